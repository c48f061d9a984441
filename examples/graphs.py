"""The graphs of the examples, by name: communities (made), digits (of scikit-learn), public ones.

Public data sets are read from ``root`` if it is given, a folder laid out as
``<PyG class>/<data set>/raw``; it may be read-only, because its files are linked into a cache
folder, where PyG writes what it makes of them. Without ``root`` they are downloaded there. One
process at a time does so; the others wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch_geometric import datasets as pyg
from torch_geometric.data import Data, Dataset
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import to_undirected

from lightning_gnnpipe import make_communities

NUM_NEIGHBOURS = 10  # of an image of digits
NUM_NODES = 10_000  # of the communities

# Data sets of each PyG class, and how it is built; bags of words are scaled to sum to one.
Builder = Callable[..., Dataset]
FAMILIES: dict[str, tuple[Builder, tuple[str, ...]]] = {
    "Planetoid": (
        partial(pyg.Planetoid, transform=NormalizeFeatures()),
        ("Cora", "CiteSeer", "PubMed"),
    ),
    "Coauthor": (partial(pyg.Coauthor, transform=NormalizeFeatures()), ("CS", "Physics")),
    "WikipediaNetwork": (
        partial(pyg.WikipediaNetwork, geom_gcn_preprocess=True, transform=NormalizeFeatures()),
        ("chameleon", "squirrel"),
    ),
    "HeterophilousGraphDataset": (
        pyg.HeterophilousGraphDataset,
        ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions"),
    ),
}


def load_graph(name: str, root: str | None = None) -> Data | Dataset:
    """Return the graph ``name``, whatever its case: ``communities``, ``digits``, ``Cora``, ..."""
    if name.lower() == "communities":
        return make_communities(NUM_NODES)
    if name.lower() == "digits":
        return load_digits_graph()
    cache_dir().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir() / "graphs.lock"):
        return load_public_graph(name, root)


def load_public_graph(name: str, root: str | None) -> Data | Dataset:
    if name.lower().startswith("ogbn-"):
        folder = name.lower().replace("-", "_")
        return load_ogb_graph(name.lower(), link_raw_files("PygNodePropPredDataset", folder, root))
    for family, (build, members) in FAMILIES.items():
        for member in members:
            if name.lower() == member.lower():
                return build(root=str(link_raw_files(family, member, root)), name=member)
    known = ", ".join(member for _, members in FAMILIES.values() for member in members)
    raise ValueError(
        f"Expected a data set among communities, digits, {known}, ogbn-* (got {name!r})."
    )


def load_ogb_graph(name: str, folder: Path) -> Dataset:
    """Return an OGB node data set; torch.load, which OGB calls, refuses PyG's classes by itself."""
    from ogb.nodeproppred import PygNodePropPredDataset
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    torch.serialization.add_safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage])
    return PygNodePropPredDataset(name, str(folder))


def load_digits_graph() -> Data:
    """Return scikit-learn's 1,797 images of digits, each linked to the images most like it."""
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    pixels, labels = load_digits(return_X_y=True)
    neighbours = kneighbors_graph(pixels, n_neighbors=NUM_NEIGHBOURS).tocoo()
    edge_index = torch.from_numpy(np.stack([neighbours.row, neighbours.col])).long()
    return Data(
        x=torch.from_numpy(pixels / 16).float(),  # grey levels 0 .. 16
        edge_index=to_undirected(edge_index, num_nodes=len(labels)),
        y=torch.from_numpy(labels).long(),
    )


def cache_dir() -> Path:
    """Return the folder for processed data sets."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning_gnnpipe"


def link_raw_files(family: str, member: str, root: str | None) -> Path:
    """Return the writable root of a PyG class, in which a data set's raw files are now links.

    Without ``root`` nothing is linked: PyG downloads there what it does not find.
    """
    target = cache_dir() / family
    if root is None:
        return target
    folders = Path(root, family).glob("*")
    spellings = (member.lower(), member.lower().replace("-", "_"))
    source = next((folder for folder in folders if folder.name.lower() in spellings), None)
    if source is None:
        raise FileNotFoundError(
            f"Expected the raw files of {member} in {Path(root, family, member)} (not found). "
            "Name the folder that holds them with --root, or leave --root and GNNPIPE_DATA out "
            "to download them."
        )
    for path in source.rglob("*"):
        relative = path.relative_to(source)
        link = target / source.name / relative
        if path.is_file() and "processed" not in relative.parts and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # a link to a folder that has moved
            link.symlink_to(path.resolve())
    return target

"""The sets of small graphs of the examples, by name: synthetic ones, TUDataset and ogbg-molhiv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from graphs import link_raw_files
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import TUDataset

TU_NAMES = ("MUTAG", "ENZYMES", "PROTEINS")
ATOM_KINDS, BOND_KINDS = 5, 3


@dataclass(frozen=True)
class MoleculeSet:
    """Small graphs in three parts.

    Attributes:
        train: Graphs to train on.
        val: Graphs to choose weights by.
        test: Graphs to report on.
        num_classes: Classes of the graphs.
        atom_channels: Features of a node: their number, or values of each that is an integer.
        bond_channels: Features of an edge, in the same way; None for edges without.
        metric: What the set is judged by.
    """

    train: Sequence[Data]
    val: Sequence[Data]
    test: Sequence[Data]
    num_classes: int
    atom_channels: int | tuple[int, ...]
    bond_channels: int | tuple[int, ...] | None
    metric: Literal["acc", "auroc"] = "acc"


def load_molecules(name: str, root: str | None) -> MoleculeSet:
    """Return the set ``name``, whatever its case."""
    if name.lower() == "synthetic":
        train, val, test = split([draw_molecule(seed) for seed in range(2000)])
        return MoleculeSet(train, val, test, 2, (ATOM_KINDS,), (BOND_KINDS,))
    if name.lower() == "ogbg-molhiv":
        return load_molhiv(root)
    for member in TU_NAMES:
        if name.lower() == member.lower():
            dataset = TUDataset(str(link_raw_files("TUDataset", member, root)), member)
            train, val, test = split(dataset)
            bond_channels = dataset.num_edge_features or None
            return MoleculeSet(
                train, val, test, dataset.num_classes, dataset.num_features, bond_channels
            )
    known = ", ".join(TU_NAMES)
    raise ValueError(f"Expected a data set among synthetic, ogbg-molhiv, {known} (got {name!r}).")


def split(graphs: Any) -> tuple[Any, Any, Any]:
    """Return eight tenths, one tenth and the last tenth of the graphs, drawn at random."""
    order = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(0)).tolist()
    ends = len(order) * 8 // 10, len(order) * 9 // 10
    parts = order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] :]
    train, val, test = ([graphs[n] for n in part] for part in parts)
    return train, val, test


def draw_molecule(seed: int) -> Data:
    """Return a synthetic molecule: a ring of 5 or 6 atoms grown into a tree, in one of two classes.

    Those of class 1 hold a certain group: an atom of kind 0 and one of kind 1 with a bond of kind 2
    between them; those of class 0 hold none. All else is random.
    """
    draw = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw)

    num_atoms, ring = int(pick(12, 25)), int(pick(5, 7))
    pairs = [(n, (n + 1) % ring) for n in range(ring)]
    pairs += [(int(pick(0, n)), n) for n in range(ring, num_atoms)]
    ends = torch.tensor(pairs).t()
    atoms, bonds = pick(0, ATOM_KINDS, num_atoms), pick(0, BOND_KINDS, num_atoms)

    label = seed % 2
    if label:
        place = int(pick(0, num_atoms))
        atoms[ends[:, place]], bonds[place] = torch.tensor([0, 1]), 2
    else:
        bonds[(atoms[ends].sort(dim=0).values == torch.tensor([[0], [1]])).all(dim=0)] = 0
    return Data(
        x=atoms[:, None],
        edge_index=torch.cat([ends, ends.flip(0)], dim=1),
        edge_attr=torch.cat([bonds, bonds])[:, None],
        y=torch.tensor([label]),
    )


def load_molhiv(root: str | None) -> MoleculeSet:
    """Return OGB's molecules, by scaffold: does one keep HIV from multiplying?"""
    from ogb.graphproppred import PygGraphPropPredDataset
    from ogb.utils.features import get_atom_feature_dims, get_bond_feature_dims
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    # OGB unpickles what it has processed by torch.load, which has to be told of PyG's classes.
    torch.serialization.add_safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage])
    folder = link_raw_files("PygGraphPropPredDataset", "ogbg_molhiv", root)
    dataset = PygGraphPropPredDataset("ogbg-molhiv", str(folder))
    parts = dataset.get_idx_split()
    train, val, test = (dataset[parts[name]] for name in ("train", "valid", "test"))
    return MoleculeSet(
        train,
        val,
        test,
        num_classes=2,
        atom_channels=tuple(get_atom_feature_dims()),
        bond_channels=tuple(get_bond_feature_dims()),
        metric="auroc",
    )

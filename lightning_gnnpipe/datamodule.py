"""FullGraphDataModule: one graph as the only batch of each epoch.

It checks the graph before processes start, so a malformed one is not found deep inside a pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, get_args

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from torch_geometric.data import Data, Dataset, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.utils import index_to_mask, is_sparse

from lightning_gnnpipe.errors import ConfigError, GNNPipeError, GraphError, checks_names
from lightning_gnnpipe.graph import (
    check_edges,
    cut_in_turn,
    first_not_finite,
    fold,
    open_stored,
    partition_nodes,
    tensor_fingerprint,
    text_fingerprint,
    write_stored,
    written_whole,
)
from lightning_gnnpipe.types import Partition, PartitionMethod

MASKS = ("train_mask", "val_mask", "test_mask")  # in the order of `split_fracs`


class FullGraphDataModule(L.LightningDataModule):
    """Serve the whole graph as the only batch of fit, validate, test and predict.

    Masks come from the graph (one column of ``[num_nodes, num_splits]`` masks) or from an OGB data
    set's split; without either they are drawn at random. A graph with a training mask may lack
    validation or test masks if no step uses them. The given graph is not changed:
    ``datamodule.data`` is a shallow copy that shares its tensors. To train and validate on
    different graphs, pass loaders instead: ``DataLoader([data], batch_size=None)``.

    Examples:
        >>> trainer.fit(module, datamodule=FullGraphDataModule(Planetoid(root, "Cora")))

    Args:
        data: A ``Data``, a PyG data set of one graph, an OGB node data set, or a folder that
            ``prepare_graph`` has written: its tensors are memory-mapped, and its split is chosen.
            Integer labels of shape ``[num_nodes, 1]`` become ``[num_nodes]``.
        split: Column of masks that hold several splits.
        split_fracs: Shares of train, validation and test nodes for drawn masks; not used if the
            graph has masks.
        seed: Seed of drawn masks; equal seeds give equal masks on every rank.

    Raises:
        GraphError: The graph is heterogeneous, has no edges, shows no number of nodes (by ``x`` or
            ``num_nodes``), or its parts disagree. What is not finite in it is named in a warning.
        ConfigError: ``split`` or ``split_fracs`` is out of range.
    """

    @checks_names
    def __init__(
        self,
        data: Data | Dataset | str | Path,
        *,
        split: int = 0,
        split_fracs: tuple[float, float, float] = (0.6, 0.2, 0.2),
        seed: int = 0,
    ) -> None:
        super().__init__()
        if isinstance(data, str | Path):
            _check_split(split, num_splits=1)
            values, stored = open_stored(Path(data))
            self.data = Data(**values, stored=stored)
            return
        graph = copy.copy(_single_graph(data))
        num_nodes = _count_nodes(graph)
        edge_sets = [e for name, e in graph if f"_{name}".endswith("_edge_index") or is_sparse(e)]
        if not edge_sets:
            _refuse("'edge_index' of shape [2, num_edges]", "none", "Set data.edge_index.")
        for edges in edge_sets:
            if not is_sparse(edges):  # its shape is checked where it is an argument
                check_edges(edges, num_nodes)
        for name in ("y", *MASKS):
            _check_rows(graph, name, num_nodes)
        _check_edge_rows(graph)
        _check_inputs(graph)
        y = graph.y
        if y is not None and not y.is_floating_point() and y.shape == (num_nodes, 1):
            graph.y = y.squeeze(1)  # OGB's labels

        if hasattr(data, "get_idx_split"):
            _check_split(split, num_splits=1)
            _masks_from_indices(graph, data.get_idx_split())
        elif any(name in graph for name in MASKS):
            _select_split(graph, split)
        else:
            _check_split(split, num_splits=1)
            draw_masks(graph, split_fracs, seed)
            shares = ", ".join(f"{share:.0%}" for share in split_fracs)
            rank_zero_info(f"The graph has no masks: {shares} are drawn to train, validate, test.")
        if not graph.train_mask.any():
            rank_zero_warn("'train_mask' selects no node: there is nothing to train on.")
        if graph.y is not None and graph.y.is_floating_point():
            rows = torch.stack([graph[name] for name in MASKS if name in graph]).any(0)
            used = graph.y.where(rows.view(-1, *[1] * (graph.y.dim() - 1)), 0)
            _check_finite("y", used, "masks without such nodes")
        self.data = graph

    @property
    def num_features(self) -> int:
        """Number of features of a node; 0 without features."""
        return int(self.data.num_features)

    @property
    def num_classes(self) -> int:
        """Number of classes: the largest label plus one."""
        return int(self.data.y.max()) + 1

    def train_dataloader(self) -> SingleGraphLoader:
        return SingleGraphLoader(self.data)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def prepare_graph(
    data: Data | Dataset | FullGraphDataModule | str | Path,
    folder: str | Path,
    *,
    num_chunks: int,
    partition: Partition = "metis",
    seed: int = 0,
) -> Path:
    """Write a graph into a folder that ``FullGraphDataModule(folder)`` opens; return the folder.

    Nodes lie in the order of chunks, so that no process makes copies of them or cuts the graph.
    Features are read and written block by block, edges chunk by chunk. Only METIS, KaMinPar and
    "random" need all edges in memory; "contiguous" and an assignment do not. The folder is written
    whole or not at all. If it holds the same graph in the same chunks, it is left as it is.

    Under ``GNNPipeStrategy``, ``trainer.predict`` returns rows of all nodes in the order of
    ``data``; elsewhere ``batch.n_id`` has the node of each row.

    Examples:
        >>> prepare_graph(PygNodePropPredDataset("ogbn-products"), "products", num_chunks=16)
        >>> trainer.fit(module, datamodule=FullGraphDataModule("products"))

    Args:
        data: What ``FullGraphDataModule`` takes, a ``FullGraphDataModule`` with other splits, or a
            folder of arrays named like attributes of ``Data``: ``x.npy``, ``edge_index.npy``.
        folder: Is made; its parents too.
        num_chunks: Chunks, K. Leave the strategy's ``num_chunks`` at "auto", or give this K or 1.
        partition: As that of ``GNNPipeStrategy``.
        seed: Seed of the partition.

    Raises:
        GraphError: The graph cannot be read, or has values other than tensors and plain ones.
        ConfigError: The folder holds something else, or cannot be written.
    """
    if isinstance(partition, str) and partition not in get_args(PartitionMethod):
        choices = ", ".join(get_args(PartitionMethod))
        _refuse(f"'partition' to be one of {choices}", partition, "Leave it out.", ConfigError)
    if isinstance(data, str | Path):
        data = _open_arrays(Path(data))
    graph = (data if isinstance(data, FullGraphDataModule) else FullGraphDataModule(data)).data
    _check_values(graph)
    tensors = {name: one for name, one in graph if isinstance(one, Tensor)}
    values = {name: one for name, one in graph if name not in tensors}
    method = str(tensor_fingerprint(partition)) if isinstance(partition, Tensor) else partition
    options = repr((list(tensors), values, num_chunks, method, seed))
    source = fold([text_fingerprint(options), *map(tensor_fingerprint, tensors.values())])
    folder, edge_index, num_nodes = Path(folder), tensors.pop("edge_index"), int(graph.num_nodes)
    with written_whole(folder) as partial:
        if partial is not None:
            parts = partition_nodes(
                edge_index, num_nodes, num_chunks=num_chunks, method=partition, seed=seed
            )
            cut = nodes, _ = cut_in_turn(edge_index, parts)
            of_edges = {name: one for name, one in tensors.items() if graph.is_edge_attr(name)}
            arrays = {
                name: (one, nodes if graph.is_node_attr(name) else None)
                for name, one in tensors.items()
                if name not in of_edges
            }
            about = {"source": source, "values": values}
            write_stored(partial, arrays, of_edges, edge_index.size(1), cut, about)
        elif open_stored(folder)[1].source != source:
            _refuse(
                f"{folder} to hold this graph in these chunks",
                "another one",
                "Remove the folder, or choose another.",
                ConfigError,
            )
    return folder


def _open_arrays(folder: Path) -> Data:
    """Return the graph of a folder of arrays, memory-mapped."""
    found = dict[str, Tensor]()
    if not folder.is_dir():
        _refuse("a folder of arrays", f"no folder '{folder}'", "Correct the path.")
    for path in sorted(folder.glob("*.npy")):
        try:
            found[path.stem] = torch.from_numpy(np.load(path, mmap_mode="c"))
        except (OSError, ValueError, TypeError) as error:
            _refuse(f"{path} to be an array of numbers", str(error), "Write it by numpy.save.")
    return Data(**found)


def _check_values(graph: Data) -> None:
    """Refuse what a folder cannot hold, and numbers of nodes, which change there."""
    for name, value in graph:
        if isinstance(value, Tensor) and not is_sparse(value):
            has_rows = graph.is_node_attr(name) or graph.is_edge_attr(name)
            is_number = value.is_floating_point() or value.dtype is torch.bool
            is_kind = name in ("x", "y", "edge_attr", "node_type", "edge_type")
            names_nodes = "index" in name or not (is_number or (is_kind and has_rows))
            names_nodes |= name != "x" and graph.num_nodes in value.shape[1:]  # of pairs
            is_kept = name.isidentifier() and name != "n_id" and not names_nodes
        else:
            is_kept = isinstance(value, bool | int | float | str)
        if not is_kept and name != "edge_index":
            _refuse(
                "plain values, and tensors with a row for each node or edge, beside 'edge_index'",
                f"'{name}', {_describe(value)}",
                f"Remove it: del data.{name} (of a data set: FullGraphDataModule(dataset).data). "
                "Node numbers change: use a mask of nodes. Other integers may be floats: "
                f"data.{name} = data.{name}.float().",
            )


class SingleGraphLoader:
    """Yield one graph, the same object in each epoch: nothing is copied, collated or sampled.

    It is no ``DataLoader``, since Lightning would split its one graph over ranks by a sampler.
    """

    def __init__(self, data: Data) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Data]:
        yield self.data

    def __len__(self) -> int:
        return 1


def check_loader(loader: object) -> None:
    """Refuse a bare graph, and torch's loader of graphs; look at the values of one graph.

    A data set is not asked for its graph, which may draw random numbers.
    """
    if isinstance(loader, BaseData):
        raise ConfigError(
            expected="a loader or a data module",
            found="a graph, of which a Trainer serves one attribute after the other",
            remedy="Write DataLoader([data], batch_size=None), or datamodule=FullGraphDataModule("
            "data).",
        )
    if not isinstance(loader, DataLoader):
        return
    graphs: Any = loader.dataset
    if isinstance(graphs, list | tuple) and len(graphs) == 1 and isinstance(graphs[0], Data):
        _check_inputs(graphs[0])
    if loader.collate_fn is not default_collate:
        return
    is_known = isinstance(graphs, list | tuple | Dataset) and len(graphs) > 0
    if is_known and isinstance(graphs[0], BaseData):
        raise ConfigError(
            "torch.utils.data.DataLoader cannot join graphs to a batch.\n"
            "For one graph write DataLoader([data], batch_size=None).\n"
            "For batches of many write torch_geometric.loader.DataLoader(dataset, batch_size=32)."
        )


def _refuse(
    expected: str, found: str, remedy: str, kind: type[GNNPipeError] = GraphError
) -> NoReturn:
    raise kind(expected=expected, found=found, remedy=remedy)


def _single_graph(data: Data | Dataset) -> Data:
    if isinstance(data, Dataset):
        if len(data) != 1:
            _refuse(
                "a data set of one graph",
                f"{type(data).__name__} with {len(data)} graphs",
                "Choose one: FullGraphDataModule(dataset[0]).",
            )
        data = data[0]
    if isinstance(data, HeteroData) or not isinstance(data, Data):
        _refuse(
            "a homogeneous graph (torch_geometric.data.Data) or a data set of one",
            type(data).__name__,
            "A HeteroData graph can be converted with `data.to_homogeneous()`.",
        )
    return data


def _count_nodes(graph: Data) -> int:
    """Return the number of nodes; check the features, if there are any."""
    x = graph.x
    if x is None and "num_nodes" in graph:
        return int(graph.num_nodes)
    if isinstance(x, Tensor) and x.dim() != 2:
        _refuse(
            "node features 'x' of shape [num_nodes, num_features]",
            _describe(x),
            "Write data.x = data.x.view(data.num_nodes, -1).",
        )
    if not isinstance(x, Tensor):
        _refuse(
            "node features 'x' of shape [num_nodes, num_features], or 'num_nodes' without features",
            _describe(x),
            "Set data.num_nodes if the network has rows of weights for the nodes (nn.Embedding). "
            "Else give them features, such as one-hot degrees "
            "(torch_geometric.transforms.OneHotDegree) or a constant.",
        )
    if graph.num_nodes != x.size(0):
        _refuse(
            f"'x' to have one row for each of the {graph.num_nodes} nodes",
            _describe(x),
            "Add the missing rows to 'x', or correct 'num_nodes'.",
        )
    return x.size(0)


def _check_rows(graph: Data, name: str, num_nodes: int) -> None:
    rows = graph.get(name)
    if rows is None:
        return
    if not isinstance(rows, Tensor) or rows.dim() == 0 or rows.size(0) != num_nodes:
        remedy = (
            f"Write data.{name} = index_to_mask(nodes, size={num_nodes}) with the numbers of its "
            "nodes, by torch_geometric.utils."
        )
        if name == "y":
            remedy = "Give nodes without a label -1, and leave them out of all masks."
        expected = f"'{name}' to have one row for each of the {num_nodes} nodes"
        _refuse(expected, _describe(rows), remedy)


def _check_edge_rows(graph: Data) -> None:
    edges = graph.edge_index
    number = edges.size(1) if isinstance(edges, Tensor) and not is_sparse(edges) else None
    for name in ("edge_attr", "edge_weight"):
        rows = graph.get(name)
        if number is not None and isinstance(rows, Tensor) and (*rows.shape, 0)[0] != number:
            _refuse(
                f"'{name}' to have one row for each of the {number} edges",
                _describe(rows),
                f"Change data.{name} together with data.edge_index, as the transforms of PyG do.",
            )


def _check_inputs(graph: Data) -> None:
    for name in ("x", "edge_attr", "edge_weight"):
        _check_finite(name, graph.get(name), f"data.{name} = data.{name}.nan_to_num()", 5)


def _check_finite(name: str, values: object, remedy: str, stacklevel: int = 3) -> None:
    found = first_not_finite(values, "at edge" if name.startswith("edge") else "at node")
    if found is not None:
        rank_zero_warn(
            f"'{name}' is {found}. Unless your module expects it, write {remedy}.",
            stacklevel=stacklevel + 3,  # it warns from three calls deeper
        )


def _select_split(graph: Data, split: int) -> None:
    """Reduce every mask of ``graph`` to the column ``split``, ``[num_nodes]``."""
    given = [name for name in MASKS if name in graph]
    if MASKS[0] not in given:
        _refuse(
            f"a graph with '{MASKS[0]}' or without masks",
            ", ".join(given),
            f"Add a '{MASKS[0]}', or remove all masks: then they are drawn at random.",
        )
    for name in given:
        mask = graph[name]
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() > 2:
            _refuse(
                f"a boolean '{name}' of shape [num_nodes] or [num_nodes, num_splits]",
                _describe(mask),
                f"Write data.{name} = data.{name}.bool(). Make a mask of node numbers by "
                "torch_geometric.utils.index_to_mask.",
            )
    num_splits = max(graph[name].size(1) if graph[name].dim() == 2 else 1 for name in given)
    _check_split(split, num_splits)
    for name in given:
        if graph[name].dim() == 2:
            graph[name] = graph[name][:, split].contiguous()


def _check_split(split: int, num_splits: int) -> None:
    if not 0 <= split < num_splits:
        _refuse(
            f"'split' to be between 0 and {num_splits - 1}",
            str(split),
            f"The graph has {num_splits} split(s). For other random masks, change 'seed'.",
            ConfigError,
        )


def _masks_from_indices(graph: Data, indices: dict[str, Tensor]) -> None:
    for name, key in zip(MASKS, ("train", "valid", "test"), strict=True):
        graph[name] = index_to_mask(torch.as_tensor(indices[key]), graph.num_nodes)


def draw_masks(graph: Data, split_fracs: tuple[float, float, float], seed: int) -> None:
    """Set disjoint random masks of the given shares."""
    if len(split_fracs) != 3 or min(split_fracs) < 0 or sum(split_fracs) > 1 + 1e-9:
        _refuse(
            "'split_fracs' to be three shares that add up to at most 1",
            str(split_fracs),
            "The default is (0.6, 0.2, 0.2): train, validation, test.",
            ConfigError,
        )
    num_nodes = int(graph.num_nodes)
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    ends = [min(round(share * num_nodes), num_nodes) for share in accumulate(split_fracs)]
    for name, nodes in zip(MASKS, order.tensor_split(ends), strict=False):  # the rest has no mask
        graph[name] = index_to_mask(nodes, num_nodes)


def _describe(value: object) -> str:
    """Return shape and type of a tensor, or the type of anything else, for an error."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)}, {value.dtype}"
    return "none" if value is None else type(value).__name__

"""FullGraphDataModule: the same graph every epoch, the right split, bad graphs named at once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset

from lightning_gnnpipe._compat_torch import DispatchMode
from lightning_gnnpipe.datamodule import FullGraphDataModule, prepare_graph
from lightning_gnnpipe.errors import ConfigError, GraphError
from lightning_gnnpipe.synthetic import make_communities

NUM_NODES = 10
MASKS = ("train_mask", "val_mask", "test_mask")


def build_graph(**changes: object) -> Data:
    """A directed ring of ten nodes, 0 -> 1 -> ... -> 9 -> 0, with one-hot features."""
    nodes = torch.arange(NUM_NODES)
    parts = dict(x=torch.eye(NUM_NODES), edge_index=torch.stack([nodes, nodes.roll(-1)]))
    parts |= dict(y=nodes % 3)
    return Data(**(parts | changes))


def masks_of(column: int, num_splits: int | None = None) -> dict[str, torch.Tensor]:
    """Node ``column`` trains, the next validates, the one after tests; or all splits at once."""
    if num_splits is None:
        return {name: torch.arange(NUM_NODES) == column + i for i, name in enumerate(MASKS)}
    columns = [masks_of(split) for split in range(num_splits)]
    return {name: torch.stack([masks[name] for masks in columns], dim=1) for name in MASKS}


class OneGraph(InMemoryDataset):
    """A PyG data set that holds the given graphs, in memory only."""

    def __init__(self, graphs: list[Data]) -> None:
        super().__init__()
        self.data, self.slices = self.collate(graphs)


class OgbLike(OneGraph):
    """What an OGB node data set adds: labels ``[num_nodes, 1]`` and nodes of each split."""

    def get_idx_split(self) -> dict[str, Any]:
        return {"train": torch.tensor([0, 3, 5]), "valid": numpy.array([1]), "test": [2, 9]}


def nodes_of(data: Data) -> list[list[int]]:
    """Return the nodes of the three masks."""
    return [data[name].nonzero().flatten().tolist() for name in MASKS]


def test_every_loop_gets_the_graph_once_an_epoch_and_leaves_the_given_one():
    graph = build_graph()
    datamodule = FullGraphDataModule(graph)
    for name in ("train", "val", "test", "predict"):
        loader = getattr(datamodule, f"{name}_dataloader")()
        assert len(loader) == 1
        for _epoch in range(2):
            [batch] = loader
            assert batch is datamodule.data
    assert "train_mask" not in graph
    assert datamodule.data.x is graph.x
    assert datamodule.data.edge_index is graph.edge_index
    assert (datamodule.num_features, datamodule.num_classes) == (NUM_NODES, 3)


def test_labels_lose_their_second_dimension_and_numbers_keep_it():
    graph = build_graph()
    for y in (graph.y[:, None], graph.y[:, None].float()):
        graph.y = y
        expected = (NUM_NODES, 1) if y.is_floating_point() else (NUM_NODES,)
        assert FullGraphDataModule(graph).data.y.shape == expected


ONE_TEST_MASK = masks_of(0, num_splits=5) | {"test_mask": torch.arange(NUM_NODES) == 9}


@pytest.mark.parametrize(
    ("masks", "split", "nodes"),
    [
        (masks_of(4), 0, [[4], [5], [6]]),
        (masks_of(0, num_splits=5), 0, [[0], [1], [2]]),
        (masks_of(0, num_splits=5), 3, [[3], [4], [5]]),
        (ONE_TEST_MASK, 2, [[2], [3], [9]]),  # as in WikiCS
    ],
)
def test_masks_of_the_graph_are_used(masks, split, nodes):
    data = FullGraphDataModule(build_graph(**masks), split=split).data
    assert nodes_of(data) == nodes
    assert all(data[name].shape == (NUM_NODES,) for name in MASKS)


@pytest.mark.parametrize("num_splits", [None, 5])
@pytest.mark.parametrize("missing", ["val_mask", "test_mask"])
def test_a_graph_may_lack_masks_that_no_step_asks_for(num_splits, missing):
    masks = masks_of(0, num_splits) if num_splits else masks_of(0)
    data = FullGraphDataModule(build_graph(**masks | {missing: None})).data
    assert missing not in data
    assert data.train_mask.shape == (NUM_NODES,)


def test_random_masks_are_disjoint_seeded_and_of_the_given_shares():
    def drawn(seed=0, global_seed=0, **options):
        torch.manual_seed(global_seed)
        return FullGraphDataModule(build_graph(), seed=seed, **options).data

    data = drawn(1)
    assert [int(data[name].sum()) for name in MASKS] == [6, 2, 2]
    assert (sum(data[name].int() for name in MASKS) == 1).all()
    assert nodes_of(data) == nodes_of(drawn(1)) != nodes_of(drawn(2))
    few = drawn(split_fracs=(0.3, 0.1, 0.2))
    assert [int(few[name].sum()) for name in MASKS] == [3, 1, 2]
    assert nodes_of(few) == nodes_of(drawn(global_seed=1, split_fracs=(0.3, 0.1, 0.2)))
    made = make_communities(200, seed=2)
    bare = Data(x=made.x, edge_index=made.edge_index)
    assert nodes_of(made) == nodes_of(FullGraphDataModule(bare, seed=2).data)


def test_takes_data_sets_of_one_graph_and_their_splits():
    assert FullGraphDataModule(OneGraph([build_graph()])).data.num_nodes == NUM_NODES
    dataset = OgbLike([build_graph(y=torch.arange(NUM_NODES)[:, None])])
    data = FullGraphDataModule(dataset).data
    assert nodes_of(data) == [[0, 3, 5], [1], [2, 9]]
    assert data.y.shape == (NUM_NODES,)


def test_a_graph_without_edges_or_labels_is_fine():
    graph = build_graph(edge_index=torch.empty(2, 0, dtype=torch.long), y=None)
    assert FullGraphDataModule(graph).data.num_edges == 0


def test_nodes_outside_of_all_masks_need_no_target():
    y = torch.arange(float(NUM_NODES)).where(torch.arange(NUM_NODES) < 7, torch.nan)
    assert FullGraphDataModule(build_graph(y=y, **masks_of(4))).data.y is y


def test_a_graph_without_features_shows_its_number_of_nodes():
    module = FullGraphDataModule(build_graph(x=None, num_nodes=NUM_NODES))
    assert module.num_features == 0
    assert module.data.train_mask.shape == (NUM_NODES,)


BAD_GRAPHS = {
    "no features": (dict(x=None, y=None), r"node features 'x'.*got none.*num_nodes.*OneHot"),
    "flat features": (
        dict(x=torch.ones(NUM_NODES)),
        r"\[num_nodes, num_features\].*got \[10\].*data\.x = data\.x\.view\(data\.num_nodes, -1\)",
    ),
    "num_nodes": (dict(num_nodes=12), r"'x' to have one row for each of the 12 nodes.*\[10, 10\]"),
    "no edges": (dict(edge_index=None), r"'edge_index' of shape \[2, num_edges\] \(got none\)"),
    "edge pairs": (
        dict(edge_index=torch.zeros(4, 2).long()),
        r"got \[4, 2\].*data\.edge_index = data\.edge_index\.t\(\)\.contiguous\(\)",
    ),
    "float edges": (
        dict(edge_index=torch.zeros(2, 4)),
        r"got torch\.float32.*data\.edge_index = data\.edge_index\.long\(\)",
    ),
    "adjacency matrix": (
        dict(edge_index=torch.eye(10).bool()),
        r"got torch\.bool.*data\.edge_index = data\.edge_index\.nonzero\(\)\.t\(\)\.contig",
    ),
    "listed edges": (
        dict(edge_index=[[0, 1], [1, 0]]),
        r"got list.*data\.edge_index = torch\.as_tensor\(data\.edge_index\)\.long\(\)",
    ),
    "edge beyond": (
        dict(edge_index=torch.tensor([[0], [10]])),
        r"from 0 to 9 \(got node 10\)",
    ),
    "features of other edges": (
        dict(edge_attr=torch.ones(3, 2)),
        r"'edge_attr' to have one row for each of the \d+ edges \(got \[3, 2\].*data\.edge_attr",
    ),
    "labels": (
        dict(y=torch.zeros(9).long()),
        r"'y' to have one row for each of the 10 nodes.*-1.*out of all masks",
    ),
    "mask rows": (
        masks_of(0) | dict(val_mask=torch.ones(11).bool()),
        r"'val_mask' to have one row for each of .* \(got \[11\], torch.bool\).*index_to_mask",
    ),
    "mask of numbers": (
        masks_of(0) | dict(test_mask=torch.ones(10)),
        r"a boolean 'test_mask'.*mask\.bool\(\)",
    ),
    "no training mask": (
        masks_of(0) | dict(train_mask=None),
        r"a graph with 'train_mask'.*remove all masks",
    ),
}


@pytest.mark.parametrize(("changes", "text"), BAD_GRAPHS.values(), ids=BAD_GRAPHS.keys())
def test_bad_graph_is_refused_with_what_was_found_and_the_remedy(changes, text):
    with pytest.raises(GraphError, match=text):
        FullGraphDataModule(build_graph(**changes))


def test_a_mask_without_nodes_to_train_on_is_told() -> None:
    with pytest.warns(UserWarning, match="'train_mask' selects no node"):
        FullGraphDataModule(build_graph(**masks_of(NUM_NODES)))


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (
            OneGraph([build_graph(), build_graph()]),
            r"one graph \(got OneGraph with 2 graphs\).*dataset\[0\]",
        ),
        (HeteroData(), r"got HeteroData\).*to_homogeneous"),
        ({"x": torch.ones(3, 1)}, r"homogeneous graph.*got dict"),
    ],
)
def test_more_or_other_graphs_are_refused(graph, text):
    with pytest.raises(GraphError, match=text):
        FullGraphDataModule(graph)


FIVE, SHARES = masks_of(0, num_splits=5), "three shares that add up to at most 1"


@pytest.mark.parametrize(
    ("masks", "options", "text"),
    [
        (FIVE, {"split": -1}, r"between 0 and 4 \(got -1\)"),
        (FIVE, {"split": 5}, r"between 0 and 4 \(got 5\)"),
        ({}, {"split": 2}, r"between 0 and 0 \(got 2\).*'seed'"),
        ({}, {"split_fracs": (0.8, 0.2, 0.2)}, SHARES),
        ({}, {"split_fracs": (-0.1, 0.5, 0.5)}, SHARES),
        ({}, {"split_fracs": (0.5, 0.5)}, SHARES),
    ],
)
def test_splits_that_are_not_there_are_refused(masks, options, text):
    with pytest.raises(ConfigError, match=text):
        FullGraphDataModule(build_graph(**masks), **options)


def test_values_that_are_not_finite_are_named_with_node_and_column() -> None:
    x = torch.eye(NUM_NODES).masked_fill(torch.eye(NUM_NODES).roll(1, 1) > 0, -torch.inf)
    with pytest.warns(UserWarning, match=r"^'x' is -inf at node 0, column 1\. Unless"):
        FullGraphDataModule(Data(x=x, edge_index=torch.tensor([[0], [1]])))


class Largest(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most numbers of a tensor that is made, without views."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not (func.is_view or "detach" in str(func)):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_features_are_looked_at_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_gnnpipe.graph.partition._BLOCK", 10_000)
    monkeypatch.setattr("lightning_gnnpipe.graph.stored._BLOCK_BYTES", 40_000)
    x, edge_index = torch.ones(200, 500), torch.arange(200).repeat(2, 1)
    with Largest() as largest:
        data = FullGraphDataModule(Data(x=x, edge_index=edge_index))
        prepare_graph(data, tmp_path / "graph", num_chunks=2)
    assert largest.numbers < x.numel() // 4
    x[150, 3] = torch.nan
    with pytest.warns(UserWarning, match=r"^'x' is nan at node 150, column 3\. Unless") as warned:
        FullGraphDataModule(Data(x=x, edge_index=edge_index))
    assert [one.filename for one in warned] == [__file__]
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first process has said so
        FullGraphDataModule(Data(x=x, edge_index=edge_index))

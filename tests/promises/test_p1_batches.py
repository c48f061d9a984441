"""P1 for batches of graphs: in micro-batches of whole graphs, training equals plain PyG."""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader

from lightning_gnnpipe import StalenessWarmup
from tests.helpers.batches import (
    NETS,
    NUM_FEATURES,
    NUM_TARGETS,
    ODD_SIZES,
    SIZES,
    WIDTH,
    GraphModule,
    draw_batch,
)
from tests.helpers.cases import covering, slow
from tests.helpers.launch import FitResult, assert_shared_out, assert_transparent, fit_batches
from tests.helpers.record import StatsRecorder, assert_steps_equal

NUM_STEPS = 5
CLIPPED = {"trainer_kwargs": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}}
EPOCHS = {"trainer_kwargs": {"max_epochs": 3}}


def fit_both(
    name: str,
    batches: Any,
    num_stages: int,
    num_chunks: int,
    tmp_path: Path,
    piped: dict[str, Any] | None = None,
    **shared: Any,
) -> tuple[FitResult, FitResult]:
    plain = fit_batches(GraphModule(name), batches, tmp_path=tmp_path, **shared)
    options = {"num_stages": num_stages, "num_chunks": num_chunks, **(piped or {})}
    found = fit_batches(GraphModule(name), batches, tmp_path=tmp_path, **shared, **options)
    return found, plain


def batches_of(sizes: tuple[int, ...]) -> list[Any]:
    return [draw_batch(sizes, seed) for seed in range(NUM_STEPS)]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("num_chunks", "name"), covering([1, 2, 5, 10], NETS))
def test_one_stage_equals_plain_lightning(name: str, num_chunks: int, tmp_path: Path) -> None:
    assert_transparent(*fit_both(name, batches_of(SIZES), 1, num_chunks, tmp_path))


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("name", "num_stages", "num_chunks"),
    [
        slow("gine", 2, 1),
        ("gine", 3, 5),
        ("weighted", 2, 10),
        slow("weighted", 3, 2),
        ("jumping", 2, 5),
        slow("jumping", 3, 10),
        ("transformer", 2, 2),
        slow("transformer", 3, 5),
        ("edges inside", 2, 5),
        ("gin", 3, 4),
        slow("vig edge", 3, 4),
    ],
)
def test_stages_equal_plain_lightning(
    name: str, num_stages: int, num_chunks: int, tmp_path: Path
) -> None:
    piped, plain = fit_both(name, batches_of(SIZES), num_stages, num_chunks, tmp_path)
    assert_transparent(piped, plain)
    assert_shared_out(piped, plain)


class Optional(nn.Module):
    """Uses other weights where it is given something more."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (NUM_FEATURES, WIDTH, NUM_TARGETS)
        self.convs = nn.ModuleList(gnn.SAGEConv(*pair) for pair in pairwise(sizes))
        self.more = nn.Linear(1, NUM_FEATURES)

    def forward(self, x: Tensor, edge_index: Tensor, extra: Tensor | None = None) -> Tensor:
        x = x if extra is None else x + self.more(extra)
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


class OptionalModule(GraphModule):
    """Gives more to the module from the third step on."""

    num_steps = 0

    def forward(self, data: Batch) -> Tensor:
        self.num_steps += 1
        extra = data.x[:, :1] if self.num_steps > 2 else None
        return self.net(data.x, data.edge_index, extra=extra)


@pytest.mark.parametrize("where", [{"num_stages": 2}, {"num_stages": 1, "num_replicas": 2}])
def test_batches_that_need_other_weights(where: dict[str, int], tmp_path: Path) -> None:
    """Replicas are given the same batches, in a list, which no sampler splits."""

    def fit(**options: Any) -> FitResult:
        torch.manual_seed(0)
        module = OptionalModule(net=Optional())
        return fit_batches(module, batches_of(SIZES), num_chunks=3, tmp_path=tmp_path, **options)

    piped = fit(**where)
    assert_transparent(piped, fit())
    assert all("net.more.weight" in step.gradients for step in piped.steps[2:])


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("sizes", "name"), covering(ODD_SIZES.values(), NETS))
def test_odd_batches_equal_plain_lightning(
    sizes: tuple[int, ...], name: str, tmp_path: Path
) -> None:
    batches = [draw_batch(SIZES), *batches_of(sizes)]
    assert_transparent(*fit_both(name, batches, 1, 4, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("gine"), "jumping"])
def test_odd_batches_on_stages(name: str, tmp_path: Path) -> None:
    """All odd batches in one run, between ordinary ones: shapes change from step to step."""
    batches = [draw_batch(sizes) for sizes in (SIZES, *ODD_SIZES.values(), SIZES)]
    batches.append(draw_batch((3, 5, 2), degree=0.0))  # no edges
    assert_transparent(*fit_both(name, batches, 2, 3, tmp_path))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("num_stages", "shared", "piped"),
    [
        (2, CLIPPED, {}),
        (2, {}, {"strategy_kwargs": {"recompute": True}}),
        (2, {}, {"strategy_kwargs": {"repeat_encoder": True}}),
        (1, EPOCHS, {"strategy_kwargs": {"balance": "uniform"}}),
        # settings for one graph
        (2, {}, {"callbacks": [StalenessWarmup(1)], "strategy_kwargs": {"staleness": "gnnpipe"}}),
    ],
)
def test_options_leave_it_equal(
    num_stages: int, shared: dict[str, Any], piped: dict[str, Any], tmp_path: Path
) -> None:
    batches = batches_of(SIZES)
    found, plain = fit_both("weighted", batches, num_stages, 4, tmp_path, piped, **shared)
    assert_transparent(found, plain)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_shuffled_loaders_are_the_same_on_all_ranks(num_workers: int, tmp_path: Path) -> None:
    """The order is that of a plain Trainer, and validation between steps changes nothing."""
    graphs = draw_batch(SIZES * 3).to_data_list()
    train = DataLoader(graphs, batch_size=8, shuffle=True, num_workers=num_workers)
    shared: dict[str, Any] = {
        "max_epochs": 2,
        "val_batches": DataLoader(graphs[:20], batch_size=6),
        "trainer_kwargs": {"limit_val_batches": 1.0, "val_check_interval": 2},
    }
    piped, plain = fit_both("gine", train, 2, 3, tmp_path, **shared)
    assert_transparent(piped, plain)
    assert sum("val_loss" in step.metrics for step in piped.steps) == 4


def test_random_transforms_in_workers_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """Otherwise the strategy would refuse the batches, or the recorder what ranks have."""
    loader = DataLoader(Noisy(), batch_size=4, num_workers=2)
    module = GraphModule("gine")
    fit_batches(module, loader, num_stages=2, num_chunks=2, tmp_path=tmp_path, seeds_workers=True)


class Noisy(Dataset):
    """Adds noise to the features whenever a graph is read, in Lightning's seeded workers."""

    def __init__(self) -> None:
        self.graphs = draw_batch(SIZES).to_data_list()

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Any:
        graph = copy.copy(self.graphs[index])
        graph.x = graph.x + torch.randn_like(graph.x) + random.random()
        return graph


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_run_resumed_in_an_epoch_equals_a_plain_one(num_stages: int, tmp_path: Path) -> None:
    batches = [draw_batch(SIZES, seed) for seed in range(4)]

    def run(stages: int, folder: Path) -> FitResult:
        """Save after two steps of four, and go on from there in a new Trainer."""
        save = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        options: dict[str, Any] = {"tmp_path": tmp_path, "num_stages": stages, "num_chunks": 3}
        stop = {"enable_checkpointing": True, "max_steps": 2}
        fit_batches(GraphModule(), batches, callbacks=[save], trainer_kwargs=stop, **options)
        saved = next(folder.glob("step=2*.ckpt"))
        return fit_batches(GraphModule(), batches, max_epochs=2, ckpt_path=saved, **options)

    assert_transparent(run(num_stages, tmp_path / "piped"), run(0, tmp_path / "plain"))


def test_p3_dropout_does_not_depend_on_stages(tmp_path: Path) -> None:
    def run(dropout: float, num_stages: int) -> FitResult:
        options: dict[str, Any] = {"num_stages": num_stages, "num_chunks": 3, "tmp_path": tmp_path}
        return fit_batches(GraphModule("gine", dropout), batches_of(SIZES), **options)

    runs = [run(0.3, num_stages) for num_stages in (1, 2, 3)]
    assert_steps_equal(runs[1].steps, runs[0].steps, 1e-12)
    assert_steps_equal(runs[2].steps, runs[0].steps, 1e-12)
    assert not torch.allclose(run(0.0, 0).steps[0].outputs, runs[0].steps[0].outputs)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_p5_bytes_are_rows_that_cross_and_outputs(num_stages: int, tmp_path: Path) -> None:
    stats = StatsRecorder(tmp_path)
    batches = [draw_batch(SIZES), draw_batch((3, 0, 5, 1)), draw_batch((4, 4, 0))]
    where: dict[str, Any] = {"num_stages": num_stages, "num_chunks": 4, "tmp_path": tmp_path}
    module = GraphModule("gine")
    fit_batches(module, batches, callbacks=[stats], **where)
    weights = (num_stages - 1) * sum(p.numel() + 1 for p in module.parameters()) * 8
    for data, found in zip(batches, torch.load(tmp_path / "bytes.pt"), strict=True):
        crossing = (num_stages - 1) * data.num_nodes * WIDTH * 8
        assert found["forward"] == found["backward"] == crossing
        assert found["output"] == (num_stages - 1) * data.num_graphs * NUM_TARGETS * 8
        assert found.get("weight_grad", 0) == weights
        assert found.keys() <= {"forward", "backward", "output", "weight_grad", "control"}

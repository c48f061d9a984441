"""P1 for batches of graphs: in micro-batches of whole graphs, training equals plain PyG."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset
from torch_geometric.loader import DataLoader

from lightning_gnnpipe import GNNPipeStrategy, StalenessWarmup
from tests.helpers.batches import (
    NETS,
    NUM_TARGETS,
    ODD_SIZES,
    SIZES,
    WIDTH,
    GraphModule,
    draw_batch,
)
from tests.helpers.cases import covering, slow
from tests.helpers.launch import FitResult, assert_transparent, fit_batches
from tests.helpers.record import assert_steps_equal
from tests.promises.test_p5_bytes import BytesRecorder

NUM_STEPS = 5


def fit_both(
    name: str,
    batches: list[Any],
    num_stages: int,
    num_chunks: int,
    tmp_path: Path,
    **options: Any,
) -> tuple[FitResult, FitResult]:
    plain = fit_batches(GraphModule(name), batches, tmp_path=tmp_path, **options)
    piped = fit_batches(
        GraphModule(name),
        batches,
        num_stages=num_stages,
        num_chunks=num_chunks,
        tmp_path=tmp_path,
        **options,
    )
    return piped, plain


def batches_of(sizes: tuple[int, ...]) -> list[Any]:
    return [draw_batch(sizes, seed) for seed in range(NUM_STEPS)]


@pytest.mark.parametrize(("num_chunks", "name"), covering([1, 2, 5, 10], NETS))
def test_one_stage_equals_plain_lightning(name: str, num_chunks: int, tmp_path: Path) -> None:
    assert_transparent(*fit_both(name, batches_of(SIZES), 1, num_chunks, tmp_path))


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
    ],
)
def test_stages_equal_plain_lightning(
    name: str, num_stages: int, num_chunks: int, tmp_path: Path
) -> None:
    piped, plain = fit_both(name, batches_of(SIZES), num_stages, num_chunks, tmp_path)
    assert_transparent(piped, plain)

    names = set(plain.steps[0].weights)
    assert set().union(*piped.held_by_rank) == names
    for held in piped.held_by_rank:  # no rank did the whole work
        assert held < names


@pytest.mark.parametrize(("sizes", "name"), covering(ODD_SIZES.values(), NETS))
def test_odd_batches_equal_plain_lightning(
    sizes: tuple[int, ...], name: str, tmp_path: Path
) -> None:
    batches = [draw_batch(SIZES), *batches_of(sizes)]
    assert_transparent(*fit_both(name, batches, 1, 4, tmp_path))


@pytest.mark.parametrize("name", [slow("gine"), "jumping"])
def test_odd_batches_on_stages(name: str, tmp_path: Path) -> None:
    """All odd batches in one run, between ordinary ones: shapes change from step to step."""
    batches = [draw_batch(sizes) for sizes in (SIZES, *ODD_SIZES.values(), SIZES)]
    batches.append(draw_batch((3, 5, 2), degree=0.0))  # no edges
    assert_transparent(*fit_both(name, batches, 2, 3, tmp_path))


@pytest.mark.parametrize(
    ("num_stages", "options"),
    [
        (2, {"trainer_kwargs": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}}),
        (2, {"strategy_kwargs": {"recompute": True}}),
        (2, {"strategy_kwargs": {"repeat_encoder": True}}),
        (1, {"strategy_kwargs": {"balance": "uniform"}, "trainer_kwargs": {"max_epochs": 3}}),
        (
            2,
            {
                "callbacks": [StalenessWarmup(num_epochs=1)],
                "strategy_kwargs": {"staleness": "gnnpipe"},
            },
        ),
    ],
    ids=["clip and accumulate", "recompute", "repeat", "several epochs", "settings for one graph"],
)
def test_options_leave_it_equal(num_stages: int, options: dict[str, Any], tmp_path: Path) -> None:
    shared = {"trainer_kwargs": options.get("trainer_kwargs")}
    batches = batches_of(SIZES)
    plain = fit_batches(GraphModule("weighted"), batches, tmp_path=tmp_path, **shared)
    piped = fit_batches(
        GraphModule("weighted"),
        batches,
        num_stages=num_stages,
        num_chunks=4,
        tmp_path=tmp_path,
        **options,
    )
    assert_transparent(piped, plain)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shuffled_loaders_are_the_same_on_all_ranks(num_workers: int, tmp_path: Path) -> None:
    """The order is that of a plain Trainer, and validation between steps changes nothing."""
    graphs = draw_batch(SIZES * 3).to_data_list()

    def loaders() -> tuple[Any, Any]:
        train = DataLoader(graphs, batch_size=8, shuffle=True, num_workers=num_workers)
        return train, DataLoader(graphs[:20], batch_size=6)

    shared: dict[str, Any] = {
        "tmp_path": tmp_path,
        "max_epochs": 2,
        "trainer_kwargs": {"limit_val_batches": 1.0, "val_check_interval": 2},
    }
    train, val = loaders()
    plain = fit_batches(GraphModule("gine"), train, val_batches=val, **shared)
    train, val = loaders()
    piped = fit_batches(
        GraphModule("gine"), train, val_batches=val, num_stages=2, num_chunks=3, **shared
    )
    assert_transparent(piped, plain)
    assert sum("val_loss" in step.metrics for step in piped.steps) == 4


def test_random_transforms_in_workers_are_the_same_on_all_ranks(tmp_path: Path) -> None:
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


def test_inference_equals_plain_lightning(tmp_path: Path) -> None:
    loader = DataLoader(draw_batch(SIZES * 2).to_data_list(), batch_size=7)
    module = GraphModule("weighted")
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    plain = L.Trainer(accelerator="cpu", devices=1, **options)
    piped = L.Trainer(
        accelerator="cpu", devices=1, strategy=GNNPipeStrategy(num_chunks=3), **options
    )
    for left, right in zip(
        piped.predict(module, loader), plain.predict(module, loader), strict=True
    ):
        for key in ("nodes", "graphs"):
            torch.testing.assert_close(left[key], right[key], rtol=1e-12, atol=1e-12)
    expected = plain.test(module, loader)[0]["test_loss"]
    assert piped.test(module, loader)[0]["test_loss"] == pytest.approx(expected, abs=1e-12)
    two = GNNPipeStrategy(num_chunks=3, start_method="fork")
    staged = L.Trainer(accelerator="cpu", devices=2, strategy=two, **options)
    assert staged.test(module, loader)[0]["test_loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_run_resumed_in_an_epoch_equals_a_plain_one(num_stages: int, tmp_path: Path) -> None:
    batches = [draw_batch(SIZES, seed) for seed in range(4)]

    def run(stages: int, folder: Path) -> FitResult:
        """Save after two steps of four, and go on from there in a new Trainer."""
        save = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        trainer: dict[str, Any] = {"enable_checkpointing": True}
        options: dict[str, Any] = {"tmp_path": tmp_path, "num_stages": stages, "num_chunks": 3}
        module = GraphModule("gine", dropout=0.0)
        stop = {**trainer, "max_steps": 2, "limit_val_batches": 0}
        fit_batches(module, batches, callbacks=[save], trainer_kwargs=stop, **options)
        return fit_batches(
            GraphModule("gine"),
            batches,
            max_epochs=2,
            ckpt_path=next(folder.glob("step=2*.ckpt")),
            **options,
        )

    assert_transparent(run(num_stages, tmp_path / "piped"), run(0, tmp_path / "plain"))


def test_p3_dropout_does_not_depend_on_stages(tmp_path: Path) -> None:
    runs = [
        fit_batches(
            GraphModule("gine", dropout=0.3),
            batches_of(SIZES),
            num_stages=num_stages,
            num_chunks=3,
            tmp_path=tmp_path,
        )
        for num_stages in (1, 2, 3)
    ]
    assert_steps_equal(runs[1].steps, runs[0].steps, 1e-12)
    assert_steps_equal(runs[2].steps, runs[0].steps, 1e-12)
    plain = fit_batches(GraphModule("gine"), batches_of(SIZES), tmp_path=tmp_path)
    assert not torch.allclose(plain.steps[0].outputs, runs[0].steps[0].outputs)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_p5_bytes_are_rows_that_cross_and_outputs(num_stages: int, tmp_path: Path) -> None:
    recorder = BytesRecorder(tmp_path)
    batches = [draw_batch(SIZES), draw_batch((3, 0, 5, 1)), draw_batch((4, 4, 0))]
    fit_batches(
        GraphModule("gine"),
        batches,
        num_stages=num_stages,
        num_chunks=4,
        tmp_path=tmp_path,
        callbacks=[recorder],
    )
    for data, found in zip(batches, torch.load(tmp_path / "bytes.pt"), strict=True):
        crossing = (num_stages - 1) * data.num_nodes * WIDTH * 8
        assert found["forward"] == found["backward"] == crossing
        assert found["output"] == (num_stages - 1) * data.num_graphs * NUM_TARGETS * 8
        assert found.keys() <= {"forward", "backward", "output", "control"}

"""P1 for schedules in which micro-batches go back at once: training equals plain PyG."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.loader import DataLoader

import lightning_gnnpipe.chunks.step as steps
from lightning_gnnpipe.schedule import interleaved, simulate
from tests.helpers.batches import WIDTH, draw_batch
from tests.helpers.cases import slow
from tests.helpers.record import StatsRecorder, assert_steps_equal
from tests.helpers.staged import (
    NUM_VIRTUAL,
    LogRecorder,
    Staged,
    assert_same,
    batches_of_all_sizes,
    fit,
    single,
    widened,
)
from tests.helpers.trainers import overflow, quiet_trainer

NUM_EPOCHS = 3
OTHERS = (("1f1b", 1), ("1f1b", 2), ("interleaved", 2))
"""Schedules and numbers of stages that are to give what fill-drain gives on one."""
CLIPPED = {"trainer_kwargs": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 4}}


@pytest.mark.parametrize("num_stages", [slow(1), 2, slow(3)])
def test_all_schedules_equal_plain_lightning(num_stages: int, tmp_path: Path) -> None:
    """Of 1, 2, 5 and 10 micro-batches, with six losses, and layers before and behind the net."""
    plain = fit(None, 0, tmp_path, max_epochs=NUM_EPOCHS)
    for schedule in NUM_VIRTUAL:
        assert_same(fit(schedule, num_stages, tmp_path, max_epochs=NUM_EPOCHS), plain)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("schedule", "num_stages", "shared", "strategy"),
    [
        slow("1f1b", 2, CLIPPED, {}),
        ("interleaved", 2, CLIPPED, {}),
        ("1f1b", 2, {}, {"recompute": True}),
        slow("interleaved", 2, {}, {"num_virtual": 3, "recompute": True}),
        ("interleaved", 3, {}, {"balance": [1, 1, 2, 1, 1, 1]}),
    ],
)
def test_options_leave_it_equal(
    schedule: str,
    num_stages: int,
    shared: dict[str, Any],
    strategy: dict[str, Any],
    tmp_path: Path,
) -> None:
    plain = fit(None, 0, tmp_path, **shared)
    options = {**shared, "num_chunks": 4, "strategy_kwargs": strategy}
    assert_same(fit(schedule, num_stages, tmp_path, **options), plain)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_p3_dropout_is_that_of_fill_drain(schedule: str, tmp_path: Path) -> None:
    wanted, found = (
        fit(*where, tmp_path, module=Staged(dropout=0.3), num_chunks=3)
        for where in (("fill_drain", 1), (schedule, 2))
    )
    assert_same(found, wanted)
    assert_steps_equal(found[0].steps, wanted[0].steps, 1e-12)


class Odd(Staged):
    """Multiplies the loss on its way to backward, differently in each step."""

    def backward(self, loss: Tensor) -> None:
        (loss * (3.7 + self.num_steps)).backward()


def test_a_loss_that_is_scaled_on_its_way_is_right(tmp_path: Path) -> None:
    plain = fit(None, 0, tmp_path, module=Odd())
    assert_same(fit("1f1b", 2, tmp_path, module=Odd()), plain)


class Whole(Staged):
    """Has its layers itself, so that it is the pipelined module, norms and metric and all.

    It draws and counts with more than tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convs = self.net.convs
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.convs).double()
        del self.net
        self.streams = [torch.Generator(), random.Random(1), np.random.default_rng(2)]
        self.counts = np.zeros(3)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Any:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(norm(x), edge_index).tanh()
        return {"nodes": x, "graphs": (gnn.global_mean_pool(x, batch, size), x.argmax(-1))}

    def training_step(self, data: Any, batch_idx: int) -> dict[str, Tensor]:
        self.num_steps += 1
        first, second, third = self.streams
        drawn = float(torch.rand((), generator=first)), second.random(), float(third.random())
        self.counts += drawn
        self.seen = torch.tensor([*drawn, self.counts.sum()], dtype=torch.float64)
        self.kept.append(float(torch.rand(())))
        out = self(widened(data.x), data.edge_index, data.batch, data.num_graphs)
        graphs = out["graphs"][0]
        loss = out["nodes"].square().mean() + (graphs - self.kept[-1] - sum(drawn)).abs().sum()
        self.metric(graphs.detach(), graphs.detach() * self.num_steps)
        self.log("train_loss", loss, batch_size=1)
        self.log_dict({"metric": self.metric, "count": self.num_steps}, batch_size=1)
        self.outputs = out["nodes"].detach()
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.convs.parameters(), *self.norms.parameters()], lr=1e-3)


def test_a_whole_module_with_deferred_norms_is_that_of_fill_drain(tmp_path: Path) -> None:
    def run(schedule: str, num_stages: int) -> Any:
        options = {"recompute": schedule == "1f1b"}
        batches = batches_of_all_sizes()[3:]
        shared: dict[str, Any] = {"module": Whole(), "batches": batches, "num_chunks": 3}
        return fit(schedule, num_stages, tmp_path, strategy_kwargs=options, **shared)

    expected = run("fill_drain", 1)
    assert expected[0].state_dict["norms.2.num_batches_tracked"] == 3
    for arguments in OTHERS:
        assert_same(run(*arguments), expected)


@pytest.mark.slow
def test_a_run_resumed_under_another_schedule_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    batches = [draw_batch((4, 7, 1, 9, 5, 6), seed) for seed in range(4)]
    options: dict[str, Any] = {"batches": batches, "num_chunks": 3}
    plain = fit(None, 0, tmp_path, max_epochs=2, **options)[0]
    for first, second in (("interleaved", "1f1b"), ("fill_drain", "interleaved")):
        save, keep = ModelCheckpoint(tmp_path / first), {"enable_checkpointing": True}
        fit(first, 2, tmp_path, callbacks=[save], trainer_kwargs=keep, **options)
        (path,) = (tmp_path / first).glob("*.ckpt")
        resumed = fit(second, 3, tmp_path, max_epochs=2, ckpt_path=path, **options)[0]
        assert_steps_equal(resumed.steps, plain.steps[4:])


class Logging(Staged):
    """Computes its metric over replicas in each step, and logs the mean over them."""

    def training_step(self, data: Any, batch_idx: int) -> dict[str, Tensor]:
        result = super().training_step(data, batch_idx)
        self.log("total_error", self.metric.compute(), batch_size=1)
        self.log("mean_loss", result["loss"], sync_dist=True, batch_size=1)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [slow("1f1b"), "interleaved"])
def test_replicas_are_those_of_fill_drain(schedule: str, tmp_path: Path) -> None:
    """Two pipelines of two stages, of which each has other batches, some with fewer graphs."""
    graphs = [graph for data in batches_of_all_sizes() for graph in data.to_data_list()]
    runs = []
    for name in ("fill_drain", schedule):
        L.seed_everything(7, verbose=False)
        trainer = quiet_trainer(
            4,
            {"schedule": name, "data_parallel": 2, "num_chunks": 4, "balance": "uniform"},
            max_epochs=2,
            callbacks=[LogRecorder(tmp_path)],
            accumulate_grad_batches=2,
        )
        module = Logging()
        trainer.fit(module, DataLoader(graphs, batch_size=5, shuffle=True))
        logged = [torch.load(tmp_path / f"logged{rank}.pt") for rank in range(4)]
        runs.append((module.state_dict(), logged))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(runs[1][1], runs[0][1], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-12)


class Decaying(Staged):
    """Decays its weights by hand."""

    def training_step(self, data: Any, batch_idx: int) -> dict[str, Tensor]:
        found = super().training_step(data, batch_idx)
        return {"loss": found["loss"] + sum(p.square().sum() for p in self.net.parameters())}


def test_a_penalty_on_weights_is_refused_where_the_loss_runs_on_one_rank(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"weights of pipelined layers to be read.*fill_drain"):
        fit("1f1b", 2, tmp_path, module=Decaying())


@pytest.mark.slow
def test_half_precision_is_that_of_fill_drain(tmp_path: Path) -> None:
    """To the bit where there is one micro-batch; else sums are rounded in another order."""
    shared: dict[str, Any] = {"trainer_kwargs": {"precision": "bf16-mixed"}, "num_chunks": 4}
    batches = [single(data) for data in batches_of_all_sizes()]
    plain, *others = [
        fit(*where, tmp_path, module=Staged().float(), batches=batches, **shared)[0]
        for where in (("fill_drain", 1), *OTHERS)
    ]
    assert_steps_equal(others[0].steps[:1], plain.steps[:1], 0.0)
    for run in others:
        for ours, theirs in zip(run.steps, plain.steps, strict=True):
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-2, atol=0)
            left, right = (
                torch.cat([step.gradients[name].flatten() for name in sorted(step.gradients)])
                for step in (ours, theirs)
            )
            assert (left - right).norm() < 2e-2 * right.norm()


class Overflowing(Staged):
    """The gradient of a weight overflows in the third step."""

    def on_after_backward(self) -> None:
        if self.num_steps == 3:
            overflow(self, self.net.convs[2].lin_l.bias)

    def loss(self, kind: str, *args: Any) -> Tensor:
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale(), batch_size=1)
        return super().loss(kind, *args)


def test_a_loss_scale_is_that_of_fill_drain(tmp_path: Path) -> None:
    """It grows after two steps, and falls where a gradient overflows on one rank."""
    batches = [single(data) for data in batches_of_all_sizes()]
    runs = []
    for where in (("fill_drain", 1), ("1f1b", 1), ("interleaved", 2)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        trainer = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        module = Overflowing(("mean over graphs", "mean over nodes")).float()
        runs.append(fit(*where, tmp_path, module=module, batches=batches, trainer_kwargs=trainer))
    scales = [step["scale"] for step in runs[0][1][0]]
    assert scales[:6] == [1024, 1024, 2048, 1024, 1024, 2048]
    for result, logged in runs[1:]:
        assert all([step["scale"] for step in rank] == scales for rank in logged)
        for ours, theirs in zip(result.steps, runs[0][0].steps, strict=True):
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-2, atol=0)
            torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-2, atol=1e-4)


class LiveRecorder(L.Callback):
    """Writes how many micro-batches each rank has kept, by its states and by their tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[int, weakref.ref[Tensor]] = {}
        self.most = [0, 0, 0]
        self.peaks: list[list[int]] = []

    def watch(self, method: Callable[..., None]) -> Callable[..., None]:
        def run(step: Any, stage: Any, chunk: Any) -> None:
            method(step, stage, chunk)
            states, sends = step._chunks, step.spec.transport._sends
            for state in states.values():
                self.tensors.setdefault(id(state.sent[0]), weakref.ref(state.sent[0]))
            self.tensors = {key: one for key, one in self.tensors.items() if one() is not None}
            self.most = list(map(max, self.most, map(len, (states, self.tensors, sends))))

        return run

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.peaks.append(self.most)
        self.most = [0, 0, 0]

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        torch.save(self.peaks, self.folder / f"live{trainer.global_rank}.pt")


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    [("1f1b", 1), slow("1f1b", 2), ("1f1b", 3), ("interleaved", 2), slow("interleaved", 3)],
)
def test_what_is_kept_is_what_the_simulator_says(
    schedule: str, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After forward: between its actions a rank keeps as many micro-batches, and no more."""
    recorder = LiveRecorder(tmp_path)
    for op, method in list(steps._METHODS.items()):
        monkeypatch.setitem(steps._METHODS, op, recorder.watch(method))
    batches = [draw_batch([3] * number, number) for number in (12, 24, 5)]
    fit(schedule, num_stages, tmp_path, batches=batches, num_chunks=24, callbacks=[recorder])
    num_virtual = NUM_VIRTUAL[schedule] if num_stages > 1 else 1
    for rank in range(num_stages):
        peaks = torch.load(tmp_path / f"live{rank}.pt")
        for number, (states, tensors, _) in zip((12, 24, 5), peaks, strict=True):
            built = interleaved(num_stages, num_virtual, number)
            assert states == tensors == simulate(built).peak_live[rank]
            assert number < 12 or states < number * num_virtual
        # what is sent is let go as well: no more with 24 micro-batches than with 12
        assert peaks[0][2] == peaks[1][2]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("schedule", "num_cuts"), [("1f1b", 1), ("interleaved", 3)])
def test_p5_bytes_are_rows_that_cross_and_outputs(
    schedule: str, num_cuts: int, tmp_path: Path
) -> None:
    data, stats = draw_batch((3, 5, 2, 6, 1, 4)), StatsRecorder(tmp_path)
    fit(schedule, 2, tmp_path, batches=[data, data], num_chunks=3, callbacks=[stats])
    for found in torch.load(tmp_path / "bytes.pt"):
        assert found["forward"] == found["backward"] == num_cuts * data.num_nodes * WIDTH * 8
        graphs, nodes = data.num_graphs * WIDTH * 8, data.num_nodes * (WIDTH + 1) * 8
        assert found["output"] == graphs + nodes

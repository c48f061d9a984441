"""P1 for schedules in which micro-batches go back at once: training equals plain PyG."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch_geometric import nn as gnn

import lightning_gnnpipe.engine.step as steps
from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.schedule import Schedule, interleaved, simulate
from tests.helpers.batches import WIDTH, draw_batch
from tests.helpers.launch import FitResult, fit_batches
from tests.helpers.record import assert_steps_equal
from tests.helpers.staged import Deep, FreshBatches, LogRecorder, Staged, batches_of_all_sizes
from tests.promises.test_p1_batches import assert_transparent
from tests.promises.test_p5_bytes import BytesRecorder

NUM_VIRTUAL = {"fill_drain": 1, "1f1b": 1, "interleaved": 2}
NUM_EPOCHS = 3


class Turning(Staged):
    """Meets a batch with another loss in each epoch."""

    def training_step(self, data: Any, batch_idx: int) -> dict[str, Tensor]:
        return super().training_step(data, batch_idx + self.current_epoch)


def fit(
    schedule: str | None, num_stages: int, tmp_path: Path, **options: Any
) -> tuple[FitResult, list[list[dict[str, float]]]]:
    """Train; plainly where there is no schedule. Return as well what each rank has logged."""
    folder = tmp_path / f"{schedule}_{num_stages}"
    folder.mkdir(exist_ok=True)
    callbacks = [LogRecorder(folder), *options.pop("callbacks", ())]
    result = fit_batches(
        options.pop("module", None) or Turning(),
        FreshBatches(options.pop("batches", None) or batches_of_all_sizes()),
        num_stages=num_stages if schedule else 0,
        num_chunks=options.pop("num_chunks", 10),
        callbacks=callbacks,
        strategy_kwargs={"schedule": schedule, **options.pop("strategy_kwargs", {})},
        tmp_path=tmp_path,
        **options,
    )
    ranks = range(num_stages if schedule else 1)
    return result, [torch.load(folder / f"logged{rank}.pt") for rank in ranks]


def assert_same(
    piped: tuple[FitResult, list[list[dict[str, float]]]],
    plain: tuple[FitResult, list[list[dict[str, float]]]],
) -> None:
    assert_transparent(piped[0], plain[0])
    for logged in piped[1]:
        for ours, theirs in zip(logged, plain[1][0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)  # logged in single precision


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_all_schedules_equal_plain_lightning(num_stages: int, tmp_path: Path) -> None:
    """Of 1, 2, 5 and 10 micro-batches, with six losses, and layers before and behind the net."""
    plain = fit(None, 0, tmp_path, max_epochs=NUM_EPOCHS)
    for schedule in NUM_VIRTUAL:
        assert_same(fit(schedule, num_stages, tmp_path, max_epochs=NUM_EPOCHS), plain)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "options"),
    [
        (
            "1f1b",
            2,
            {"trainer_kwargs": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 4}},
        ),
        (
            "interleaved",
            2,
            {"trainer_kwargs": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 4}},
        ),
        ("1f1b", 2, {"strategy_kwargs": {"recompute": True}}),
        ("interleaved", 2, {"strategy_kwargs": {"num_virtual": 3, "recompute": True}}),
        ("interleaved", 3, {"strategy_kwargs": {"balance": [1, 1, 2, 1, 1, 1]}}),
    ],
)
def test_options_leave_it_equal(
    schedule: str, num_stages: int, options: dict[str, Any], tmp_path: Path
) -> None:
    shared = {"trainer_kwargs": options.get("trainer_kwargs")}
    plain = fit(None, 0, tmp_path, **shared)
    assert_same(fit(schedule, num_stages, tmp_path, num_chunks=4, **options), plain)


class Odd(Staged):
    """Multiplies the loss on its way to backward, differently in each step."""

    def backward(self, loss: Tensor) -> None:
        (loss * (3.7 + self.num_steps)).backward()


def test_a_loss_that_is_scaled_on_its_way_is_right(tmp_path: Path) -> None:
    plain = fit(None, 0, tmp_path, module=Odd())
    assert_same(fit("1f1b", 2, tmp_path, module=Odd()), plain)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_p3_dropout_is_that_of_fill_drain(schedule: str, tmp_path: Path) -> None:
    runs = [
        fit(name, num_stages, tmp_path, module=Staged(dropout=0.3), num_chunks=3)
        for name, num_stages in (("fill_drain", 1), (schedule, 2))
    ]
    assert_same(runs[1], runs[0])
    assert_steps_equal(runs[1][0].steps, runs[0][0].steps, 1e-12)


def test_half_precision_is_that_of_fill_drain(tmp_path: Path) -> None:
    """To the bit where there is one micro-batch; else sums are rounded in another order."""
    shared: dict[str, Any] = {"trainer_kwargs": {"precision": "bf16-mixed"}, "num_chunks": 4}
    batches = [single(data) for data in batches_of_all_sizes()]
    plain, *others = [
        fit(name, num_stages, tmp_path, module=Staged().float(), batches=batches, **shared)[0]
        for name, num_stages in (("fill_drain", 1), ("1f1b", 1), ("1f1b", 2), ("interleaved", 2))
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

    def on_fit_start(self) -> None:
        self.net.convs[2].lin_l.bias.register_hook(self.overflow)

    def overflow(self, grad: Tensor) -> Tensor:
        return grad * torch.inf if self.num_steps == 3 else grad

    def loss(self, kind: str, *args: Any) -> Tensor:
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale(), batch_size=1)
        return super().loss(kind, *args)


def test_a_loss_scale_is_that_of_fill_drain(tmp_path: Path) -> None:
    """It grows after two steps, and falls where a gradient overflows on one rank."""
    batches = [single(data) for data in batches_of_all_sizes()]
    runs = []
    for name, num_stages in (("fill_drain", 1), ("1f1b", 1), ("interleaved", 2)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        module = Overflowing(("mean over graphs", "mean over nodes")).float()
        trainer = {"plugins": plugins}
        runs.append(
            fit(name, num_stages, tmp_path, module=module, batches=batches, trainer_kwargs=trainer)
        )
    scales = [step["scale"] for step in runs[0][1][0]]
    assert scales[:6] == [1024, 1024, 2048, 1024, 1024, 2048]
    for result, logged in runs[1:]:
        assert all([step["scale"] for step in rank] == scales for rank in logged)
        for ours, theirs in zip(result.steps, runs[0][0].steps, strict=True):
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-2, atol=0)
            for name, weight in theirs.weights.items():
                torch.testing.assert_close(ours.weights[name], weight, rtol=1e-2, atol=1e-4)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.SAGEConv(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.convs = nn.ModuleList(gnn.SAGEConv(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Any:
        x = self.first(x, edge_index)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + conv(norm(x), edge_index).tanh()
        return {"nodes": x, "graphs": (gnn.global_mean_pool(x, batch, size), x.argmax(-1))}


def test_deferred_batch_norm_is_that_of_fill_drain(tmp_path: Path) -> None:
    def run(name: str, num_stages: int, recompute: bool) -> FitResult:
        module = Staged()
        torch.manual_seed(0)
        module.net = Normed().double()
        options = {"batch_norm": "deferred", "recompute": recompute}
        batches = batches_of_all_sizes()[3:]
        arguments = {"batches": batches, "num_chunks": 3, "strategy_kwargs": options}
        return fit(name, num_stages, tmp_path, module=module, **arguments)[0]

    expected = run("fill_drain", 1, False)
    assert expected.state_dict["net.norms.0.num_batches_tracked"] == 3
    for arguments in (("1f1b", 1, True), ("1f1b", 2, True), ("interleaved", 2, False)):
        assert_transparent(run(*arguments), expected)


class Whole(Staged):
    """Has its layers itself, so that it is the pipelined module, metric and all."""

    def __init__(self) -> None:
        super().__init__()
        self.convs, self.norm = self.net.convs, self.net.norm
        del self.net
        self.dropout = 0.0

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Any:
        return Deep.forward(self, x, edge_index, batch, size)

    def training_step(self, data: Any, batch_idx: int) -> dict[str, Tensor]:
        self.num_steps += 1
        self.kept.append(float(torch.rand(())))
        out = self(widened(data.x), data.edge_index, data.batch, data.num_graphs)
        loss = out["nodes"].square().mean() + (out["graphs"][0] - self.kept[-1]).abs().sum()
        self.metric(out["graphs"][0].detach(), out["graphs"][0].detach() * self.num_steps)
        self.log("train_loss", loss, batch_size=1)
        self.log_dict({"metric": self.metric, "count": self.num_steps}, batch_size=1)
        self.outputs = out["nodes"].detach()
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.convs.parameters(), *self.norm.parameters()], lr=1e-3)


def test_a_lightning_module_that_is_pipelined_whole(tmp_path: Path) -> None:
    plain = fit(None, 0, tmp_path, module=Whole())
    for schedule, num_stages in (("1f1b", 1), ("1f1b", 2), ("interleaved", 2)):
        assert_same(fit(schedule, num_stages, tmp_path, module=Whole()), plain)


def single(data: Any) -> Any:
    return data.apply(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)


class LiveRecorder(L.Callback):
    """Writes how many micro-batches each rank has kept, by its states and by their tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[int, weakref.ref[Tensor]] = {}
        self.most_states = self.most_tensors = self.most_sends = 0
        self.peaks: list[tuple[int, int, int]] = []

    def watch(self, method: Callable[..., None]) -> Callable[..., None]:
        def run(step: Any, stage: Any, chunk: Any) -> None:
            method(step, stage, chunk)
            states, transport = step._chunks, step.parts.transport
            for state in states.values():
                self.tensors.setdefault(id(state.sent[0]), weakref.ref(state.sent[0]))
            alive = {key: one for key, one in self.tensors.items() if one() is not None}
            self.tensors = alive
            self.most_states = max(self.most_states, len(states))
            self.most_tensors = max(self.most_tensors, len(alive))
            self.most_sends = max(self.most_sends, len(transport._sends))

        return run

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.peaks.append((self.most_states, self.most_tensors, self.most_sends))
        self.most_states = self.most_tensors = self.most_sends = 0

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        torch.save(self.peaks, self.folder / f"live{trainer.global_rank}.pt")


@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    [("1f1b", 1), ("1f1b", 2), ("1f1b", 3), ("interleaved", 2), ("interleaved", 3)],
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
    most_sends = []
    for rank in range(num_stages):
        peaks = torch.load(tmp_path / f"live{rank}.pt")
        for number, (states, tensors, sends) in zip((12, 24, 5), peaks, strict=True):
            built: Schedule = interleaved(num_stages, num_virtual, number)
            assert states == tensors == simulate(built).peak_live[rank]
            assert number < 12 or states < number * num_virtual
            most_sends.append(sends)
    # what is sent is let go as well: no more with 24 micro-batches than with 12
    assert most_sends[0::3] == most_sends[1::3]


class Predictions(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[Tensor] = []

    def on_predict_batch_end(self, trainer: L.Trainer, module: Any, out: Any, *args: Any) -> None:
        self.found.append(out)

    def on_predict_end(self, trainer: L.Trainer, *args: Any) -> None:
        torch.save(self.found, self.folder / f"predicted{trainer.global_rank}.pt")


def widened(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)[:, :WIDTH]


@pytest.mark.parametrize(("num_stages", "num_virtual"), [(2, 2), (2, 3), (3, 2)])
def test_predictions_of_ranks_with_several_stages(
    num_stages: int, num_virtual: int, tmp_path: Path
) -> None:
    """Batch after batch in a stream, ranks ahead of each other as far as they can be."""
    batches = [data.update({"x": widened(data.x)}) for data in batches_of_all_sizes()]
    loader = FreshBatches(batches)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    plain = L.Trainer(accelerator="cpu", devices=1, **options).predict(Staged(), loader)
    strategy = GNNPipeStrategy(
        schedule="interleaved", num_virtual=num_virtual, num_chunks=4, start_method="fork"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=strategy,
        callbacks=[Predictions(tmp_path)],
        **options,
    )
    trainer.predict(Staged(), loader, return_predictions=False)
    for rank in range(num_stages):
        found = torch.load(tmp_path / f"predicted{rank}.pt")
        for ours, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("schedule", "num_cuts"), [("1f1b", 1), ("interleaved", 3)])
def test_p5_bytes_are_rows_that_cross_and_outputs(
    schedule: str, num_cuts: int, tmp_path: Path
) -> None:
    data = draw_batch((3, 5, 2, 6, 1, 4))
    recorder = BytesRecorder(tmp_path)
    fit(schedule, 2, tmp_path, batches=[data, data], num_chunks=3, callbacks=[recorder])
    for found in torch.load(tmp_path / "bytes.pt"):
        assert found["forward"] == found["backward"] == num_cuts * data.num_nodes * WIDTH * 8
        graphs, nodes = data.num_graphs * WIDTH * 8, data.num_nodes * (WIDTH + 1) * 8
        assert found["output"] == graphs + nodes


def test_a_run_resumed_under_another_schedule_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    batches = [draw_batch((4, 7, 1, 9, 5, 6), seed) for seed in range(4)]
    options: dict[str, Any] = {"batches": batches, "num_chunks": 3, "module": None}
    plain = fit(None, 0, tmp_path, max_epochs=2, **options)[0]

    def run(first: str, second: str, folder: Path) -> FitResult:
        save = ModelCheckpoint(folder, filename="first")
        keep = {"enable_checkpointing": True}
        fit(first, 2, tmp_path, callbacks=[save], trainer_kwargs=keep, **options)
        return fit(second, 3, tmp_path, max_epochs=2, ckpt_path=folder / "first.ckpt", **options)[0]

    for names in (("interleaved", "1f1b"), ("fill_drain", "interleaved")):
        resumed = run(*names, tmp_path / names[0])
        assert_steps_equal(resumed.steps, plain.steps[4:])

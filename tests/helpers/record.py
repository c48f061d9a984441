"""What a training step did: recorded on each rank, merged over ranks, compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

Named = dict[str, Tensor]


@dataclass
class Step:
    """One training step; parameters go by their name in the user's module."""

    outputs: Tensor
    loss: Tensor
    gradients: Named
    """Before clipping; empty where gradients were accumulated only."""
    weights: Named
    """After the optimizer's step."""
    metrics: Named = field(default_factory=dict)
    called: list[set[str]] = field(default_factory=list)
    """By rank, the layers that it called: of message passing, and linear ones."""
    bytes: dict[str, int] = field(default_factory=dict)
    """By kind, under the strategy."""


@contextmanager
def noting_calls() -> Iterator[list[nn.Module]]:
    """Note the layers that are called within the block, in forked processes too."""
    called: list[nn.Module] = []

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return nn.Module.__call__(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (gnn.MessagePassing, gnn.Linear, nn.Linear):
            patch.setattr(kind, "__call__", call, raising=False)
        yield called


class StepRecorder(L.Callback):
    """Write the steps of this rank to ``folder/rank<r>.pt``: processes share nothing else."""

    def __init__(self, folder: Path, called: list[nn.Module]) -> None:
        self.folder, self.called = folder, called
        self.steps: list[Step] = []
        self.gradients: Named = {}

    def on_train_batch_start(self, *_: Any) -> None:
        self.called.clear()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.gradients = {
            name: parameter.grad.detach().clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        with getattr(trainer.strategy, "gathered", nullcontext)():
            weights = {name: one.detach().clone() for name, one in module.named_parameters()}
        called = set(map(id, self.called))
        stats = getattr(trainer.strategy, "collect_stats", lambda: None)()
        self.steps.append(
            Step(
                outputs=module.outputs,
                loss=outputs["loss"].detach().clone(),
                gradients=self.gradients,
                weights=weights,
                metrics={"train_loss": trainer.callback_metrics["train_loss"].clone()},
                called=[{name for name, one in module.named_modules() if id(one) in called}],
                bytes={} if stats is None else stats.bytes_by_kind,
            )
        )
        self.gradients = {}

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if self.steps:
            self.steps[-1].metrics["val_loss"] = trainer.callback_metrics["val_loss"].clone()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        torch.save(self.steps, self.folder / f"rank{trainer.global_rank}.pt")


class StatsRecorder(L.Callback):
    """Notes of each step whether it was exact, and its bytes by kind, also in ``bytes.pt``."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.was_exact: list[bool] = []
        self.bytes: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        stats = trainer.strategy.collect_stats()
        self.was_exact.append(stats.is_exact)
        self.bytes.append(stats.bytes_by_kind)
        if self.folder is not None and trainer.is_global_zero:
            torch.save(self.bytes, self.folder / "bytes.pt")


def merge_ranks(ranks: list[list[Step]]) -> list[Step]:
    """Return the steps of the first rank; gradients and weights of the others have equal bits."""
    assert len({len(steps) for steps in ranks}) == 1, "ranks made different numbers of steps"
    return [_merge(steps) for steps in zip(*ranks, strict=True)]


def _merge(steps: tuple[Step, ...]) -> Step:
    merged = steps[0]
    merged.called = [one for step in steps for one in step.called]
    for rank, step in enumerate(steps):
        where = f"rank {rank} against the ranks before it"
        _assert_close(step.outputs, merged.outputs, f"outputs, {where}", tolerance=1e-14)
        _assert_close(step.loss, merged.loss, f"loss, {where}", tolerance=1e-14)
        for name, metric in step.metrics.items():
            other = merged.metrics[name]
            if metric.isnan() and other.isnan():  # of a mask without nodes
                continue
            _assert_close(metric, other, f"{name}, {where}", tolerance=1e-14)
        for kind in ("gradients", "weights"):  # gradients of some on their own stage alone
            known = getattr(merged, kind)
            for name, value in getattr(step, kind).items():
                assert torch.equal(value, known.setdefault(name, value)), (
                    f"{kind} of {name}, {where}"
                )
    return merged


def assert_steps_equal(actual: list[Step], expected: list[Step], tolerance: float = 1e-10) -> None:
    """Compare all that was recorded; a parameter without a gradient counts as one of zeros."""
    assert len(actual) == len(expected)
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        at = f"in step {number}"
        _assert_close(left.outputs, right.outputs, f"outputs {at}", tolerance)
        _assert_close(left.loss, right.loss, f"loss {at}", tolerance)
        assert left.weights.keys() == right.weights.keys()
        for name in right.weights:
            zeros = torch.zeros_like(right.weights[name])
            gradients = (left.gradients.get(name, zeros), right.gradients.get(name, zeros))
            _assert_close(*gradients, f"gradient of {name} {at}", tolerance)
            _assert_close(left.weights[name], right.weights[name], f"{name} {at}", tolerance)
        for name in left.metrics.keys() & right.metrics.keys():
            _assert_close(left.metrics[name], right.metrics[name], f"{name} {at}", tolerance)


def _assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )

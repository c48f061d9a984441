"""Trains `Staged` modules under schedules of micro-batches, and plainly; compares the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.batches import WIDTH
from tests.helpers.launch import FitResult, assert_transparent, fit_batches
from tests.helpers.staged import FreshBatches, LogRecorder, Staged, batches_of_all_sizes

NUM_VIRTUAL = {"fill_drain": 1, "1f1b": 1, "interleaved": 2}

Logged = list[list[dict[str, float]]]


class Turning(Staged):
    """Meets a batch with another loss in each epoch."""

    def training_step(self, data: Any, batch_idx: int) -> dict[str, Tensor]:
        return super().training_step(data, batch_idx + self.current_epoch)


def fit(
    schedule: str | None, num_stages: int, tmp_path: Path, **options: Any
) -> tuple[FitResult, Logged]:
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
    piped: tuple[FitResult, Logged],
    plain: tuple[FitResult, Logged],
) -> None:
    assert_transparent(piped[0], plain[0])
    for logged in piped[1]:
        for ours, theirs in zip(logged, plain[1][0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)  # logged in single precision


def single(data: Any) -> Any:
    return data.apply(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)


def widened(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-1)[:, :WIDTH]

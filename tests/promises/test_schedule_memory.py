"""What ranks keep, send and predict under schedules of micro-batches is what the schedule says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

import lightning_gnnpipe.chunks.step as steps
from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.schedule import Schedule, interleaved, simulate
from tests.helpers.batches import WIDTH, draw_batch
from tests.helpers.cases import slow
from tests.helpers.staged import FreshBatches, Staged, batches_of_all_sizes
from tests.helpers.staged_fits import NUM_VIRTUAL, fit, widened
from tests.promises.test_p5_bytes import BytesRecorder


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
            states, transport = step._chunks, step.spec.transport
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


class Predictions(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[Tensor] = []

    def on_predict_batch_end(self, trainer: L.Trainer, module: Any, out: Any, *args: Any) -> None:
        self.found.append(out)

    def on_predict_end(self, trainer: L.Trainer, *args: Any) -> None:
        torch.save(self.found, self.folder / f"predicted{trainer.global_rank}.pt")


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

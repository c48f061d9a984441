"""The progress bars show the loss, and how far a step of many chunks has come."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_gnnpipe import ChunkProgress
from lightning_gnnpipe.callbacks import monitor
from lightning_gnnpipe.steps import Controls
from tests.helpers.observed import fit


@pytest.fixture(autouse=True)
def interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_INTERVAL_S", 0.0)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_tqdm_shows_loss_and_chunks(num_stages: int, capfd: pytest.CaptureFixture[str]) -> None:
    fit(num_stages, TQDMProgressBar(), ChunkProgress(), enable_progress_bar=True)
    shown = capfd.readouterr().out
    found = re.findall(r"Epoch (\d) (forward|backward) (\d)/(\d)", shown)
    phases = ("forward", "backward")
    expected = [("0", phase, "1", "1") for phase in phases]
    for epoch in "12":
        expected += [(epoch, phase, f"{c}", "4") for phase in phases for c in range(1, 5)]
    assert list(dict.fromkeys(found)) == expected
    last = re.split(r"[\r\n]", shown.rstrip())[-1]
    assert re.match(r"Epoch 2: 100%.*train_loss=\d\.\d+", last)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_rich_shows_loss_and_chunks(num_stages: int, capfd: pytest.CaptureFixture[str]) -> None:
    class Watched(RichProgressBar):
        def refresh(self, hard: bool = False) -> None:
            super().refresh(hard)
            if self.progress is not None and self.train_progress_bar_id is not None:
                text = self.train_progress_bar.description
                if self.is_enabled:
                    print("\nshown:", text, flush=True)

    fit(num_stages, Watched(), ChunkProgress(), enable_progress_bar=True)
    shown = capfd.readouterr().out
    assert "Epoch 2/2 backward 4/4" in shown
    assert re.findall(r"shown: (.*)", shown)[-1].strip() == "Epoch 2/2"
    assert "train_loss" in shown


def test_updates_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_INTERVAL_S", 1e6)
    shown = []
    monkeypatch.setattr(monitor, "_describe", lambda bar, text: shown.append(text))
    fit(1, TQDMProgressBar(), ChunkProgress(), enable_progress_bar=True)
    assert all(re.fullmatch(r"Epoch \d", text) for text in shown) and shown


def test_without_a_bar_nothing_is_reported() -> None:
    class Probe(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            assert trainer.strategy.controls == Controls()

    fit(1, ChunkProgress(), Probe())

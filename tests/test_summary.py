"""What is told about the model at the start: Lightning's summary, and the table of stages."""

from __future__ import annotations

import re

import lightning as L
import pytest
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_gnnpipe.models import GCNII, NodeClassifier
from tests.helpers.observed import NUM_CLASSES, NUM_FEATURES, fit, make_module


def rows_of(text: str) -> tuple[list[str], int]:
    """Return the layers of each row of the table, and the sum of their parameters."""
    rows = [re.split("  +", line.strip()) for line in text.splitlines() if "convs." in line]
    return [row[1] for row in rows], sum(int(row[2].replace(",", "")) for row in rows)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("bars", [[], [TQDMProgressBar()]])
def test_the_stages_are_shown_once_with_the_summary(
    num_stages: int, bars: list[L.Callback], capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"enable_model_summary": True, "enable_progress_bar": bool(bars)}
    fit(num_stages, *bars, **options)
    shown = capfd.readouterr().out
    assert shown.count(f"Pipeline: 4 layers in {num_stages} stage") == 1
    one, two = ["convs.0 .. convs.3 (4)"], ["convs.0 .. convs.1 (2)", "convs.2 .. convs.3 (2)"]
    total = sum(p.numel() for p in make_module().parameters())
    assert rows_of(shown) == (one if num_stages == 1 else two, total)


def test_what_a_stage_computes_again_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    module = NodeClassifier(GCNII(NUM_FEATURES, 8, NUM_CLASSES, num_layers=3), NUM_CLASSES)
    fit(2, module=module, enable_model_summary=True)
    names = ["convs.0", "lin_in (repeated), convs.1 .. convs.2 (2)"]
    shown = capfd.readouterr().out
    assert rows_of(shown) == (names, sum(p.numel() for p in module.parameters()))


def test_the_stages_are_not_shown_without_the_summary(capfd: pytest.CaptureFixture[str]) -> None:
    fit(2)
    assert "Pipeline:" not in capfd.readouterr().out

"""What is taken from a step's events: phases, waits, bubble share; and the peak of memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from lightning_gnnpipe.engine import memory, phases
from lightning_gnnpipe.engine.memory import peak_memory_bytes
from tests.helpers.steps import make_stats


def test_waits_are_the_time_of_both_phases_without_computing() -> None:
    """Forward 3 slots, the loss 1, backward 3: stage 0 idles for 3 of 6, stage 1 for 2.

    stage 0   F0 .. .. .. .. B1 B0
    stage 1   .. F0 F1 .. B1 B0 ..
    """
    stats = make_stats("F0 .. .. .. .. B1 B0", ".. F0 F1 .. B1 B0 ..")
    assert phases(stats.events) == [(0, 300), (400, 700)]
    assert stats.wait_s == pytest.approx((3e-4, 2e-4))
    assert stats.bubble_frac == pytest.approx(5 / 12)
    assert sum(stats.wait_s) / 2 / 6e-4 == pytest.approx(stats.bubble_frac)


def test_bytes_are_summed_and_memory_is_not() -> None:
    stats = make_stats("F0 B0", "F0 B0", bytes_by_kind={"forward": 3})
    assert stats.bytes_by_kind == {"forward": 6}
    assert stats.peak_memory_bytes == (2**20, 2**21)


@pytest.mark.parametrize("has_status", [True, False])
def test_the_peak_grows_with_what_was_held(
    has_status: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not has_status:
        monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    before, more = peak_memory_bytes(torch.device("cpu")), 2**27  # too much for a freed place
    size = before - psutil.Process().memory_info().rss + more
    held = torch.ones(size, dtype=torch.uint8)
    assert before < peak_memory_bytes(torch.device("cpu")) < before + 2 * more
    del held

"""The picture of a step shows its forward, backward and idle time, and each chunk's number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image
from matplotlib.colors import to_rgb

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.report import draw_timeline, timeline_title
from lightning_gnnpipe.report.gantt import BACKWARD, FORWARD, IDLE
from tests.helpers.steps import make_stats


def share_of(colour: str, pixels: Any) -> float:
    return float((abs(pixels[..., :3] - to_rgb(colour)).max(axis=2) < 0.01).mean())


def test_forward_backward_and_idle_time_take_their_share_of_the_picture(tmp_path: Path) -> None:
    """Three slots forward, two backward, three idle; the slot of the loss stays white."""
    stats = make_stats("F0 F1 .. B1 ..", "F0 .. .. .. B0")
    draw_timeline(stats.events, "").savefig(tmp_path / "step.png", dpi=150)
    pixels = image.imread(tmp_path / "step.png")
    forward, backward, idle = (share_of(colour, pixels) for colour in (FORWARD, BACKWARD, IDLE))
    assert forward / backward == pytest.approx(3 / 2, rel=0.15)
    assert idle / backward == pytest.approx(3 / 2, rel=0.15)


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_chunk_is_numbered() -> None:
    """40 chunks forth and back: the picture becomes wide enough for 160 numbers."""
    row = " ".join([*(f"F{c}" for c in range(40)), "..", *(f"B{c}" for c in reversed(range(40)))])
    figure = draw_timeline(make_stats(row, row, num_chunks=40).events, "")
    found = texts(figure)
    assert found.count("outputs, loss") == 1
    assert sorted(found) == sorted([*map(str, range(40))] * 4 + ["outputs, loss"])
    assert figure.get_figwidth() > 14


def test_a_number_that_has_no_room_is_left_out() -> None:
    row = " ".join([*(f"F{c}" for c in range(1500))])
    assert texts(draw_timeline(make_stats(row).events, "")) == []


def test_axes_have_names_and_units() -> None:
    axes = draw_timeline(make_stats("F0 B0", ".. F0 .. B0").events, "my title").axes[0]
    assert axes.get_xlabel().startswith("time in the training step [ms]")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_title(loc="left") == "my title"
    assert axes.get_xlim() == pytest.approx((0, 0.4))


def test_the_title_tells_the_bubble_share() -> None:
    stats = make_stats("F0 F1 .. .. B1 B0", ".. F0 F1 B1 B0 ..")
    assert timeline_title(stats, 7) == (
        "Epoch 7: 2 stages, 2 chunks, bubble share 33.3% (at best 33.3%)"
    )
    assert timeline_title(make_stats("F0 B0", num_chunks=1)).startswith("1 stage, 1 chunk, bubble")


def test_a_trace_without_compute_is_refused() -> None:
    with pytest.raises(ConfigError, match="forward or backward actions"):
        draw_timeline([], "")


def test_matplotlib_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gnnpipe.report.gantt.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"Expected the package 'matplotlib'.*pip install matplotlib"
    ):
        draw_timeline(make_stats("F0 B0").events, "")


def test_drawing_leaves_pyplot_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    draw_timeline(make_stats("F0 B0").events, "").savefig(tmp_path / "step.png")

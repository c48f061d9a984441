"""The picture and the trace of a step show each action where it was, phases, and idle time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image
from matplotlib.colors import to_rgb

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.report import (
    BACKWARD,
    FORWARD,
    IDLE,
    chrome_trace,
    draw_timeline,
    timeline_title,
)
from tests.helpers.steps import make_stats


def share_of(colour: str, pixels: Any) -> float:
    return float((abs(pixels[..., :3] - to_rgb(colour)).max(axis=2) < 0.01).mean())


def test_forward_backward_and_idle_time_take_their_share_of_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slots forward, two backward, three idle; the slot of the loss stays white."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # it is left alone
    stats = make_stats("F0 F1 .. B1 ..", "F0 .. .. .. B0")
    draw_timeline(stats.events, "").savefig(tmp_path / "step.png", dpi=150)
    pixels = image.imread(tmp_path / "step.png")
    forward, backward, idle = (share_of(colour, pixels) for colour in (FORWARD, BACKWARD, IDLE))
    assert forward / backward == pytest.approx(3 / 2, rel=0.15)
    assert idle / backward == pytest.approx(3 / 2, rel=0.15)


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_chunk_is_numbered_where_there_is_room() -> None:
    """40 chunks forth and back: the picture becomes wide enough for 160 numbers."""
    row = " ".join([*(f"F{c}" for c in range(40)), "..", *(f"B{c}" for c in reversed(range(40)))])
    figure = draw_timeline(make_stats(row, row, num_chunks=40).events, "")
    assert sorted(texts(figure)) == sorted([*map(str, range(40))] * 4 + ["outputs, loss"])
    assert figure.get_figwidth() > 14
    row = " ".join([*(f"F{c}" for c in range(1500))])
    assert texts(draw_timeline(make_stats(row).events, "")) == []


def test_axes_and_titles_have_names_units_and_the_bubble_share() -> None:
    axes = draw_timeline(make_stats("F0 B0", ".. F0 .. B0").events, "my title").axes[0]
    assert axes.get_xlabel().startswith("time in the training step [ms]")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_title(loc="left") == "my title"
    assert axes.get_xlim() == pytest.approx((0, 0.4))
    stats = make_stats("F0 F1 .. .. B1 B0", ".. F0 F1 B1 B0 ..")
    assert timeline_title(stats, 7) == (
        "Epoch 7: 2 stages, 2 chunks, bubble share 33.3% (at best 33.3%)"
    )
    assert timeline_title(make_stats("F0 B0", num_chunks=1)).startswith("1 stage, 1 chunk, bubble")


def test_a_trace_without_compute_is_refused_and_matplotlib_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="chunks in the trace"):
        draw_timeline([], "")
    monkeypatch.setattr("lightning_gnnpipe.report.find_spec", lambda name: None)
    text = r"Expected the package 'matplotlib'.*pip install matplotlib"
    with pytest.raises(ImportError, match=text):
        draw_timeline(make_stats("F0 B0").events, "")


def test_the_trace_is_valid_json_with_every_action_in_the_thread_of_its_stage() -> None:
    """In the Trace Event Format."""
    stats = make_stats("F0 F1 .. .. .. B1 B0", ".. F0 F1 .. B1 B0 ..", bytes_by_kind={"forward": 8})
    trace = json.loads(json.dumps(chrome_trace(stats, "epoch 3"), allow_nan=False))

    def of(**fields: Any) -> list[dict[str, Any]]:
        return [e for e in trace["traceEvents"] if fields.items() <= e.items()]

    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        assert event["ph"] == "M" or (event["ts"] >= 0 and event["dur"] >= 0)
    assert trace["displayTimeUnit"] == "ms"
    [name] = of(name="process_name")
    assert name["args"] == {"name": "epoch 3"}
    threads = {e["args"]["name"]: e["tid"] for e in of(name="thread_name")}
    assert list(threads) == ["phase", "stage 0", "stage 1"]
    first = [(e["name"], round(e["ts"])) for e in of(ph="X", tid=threads["stage 0"])]
    assert first == [("F0", 0), ("F1", 100), ("B1", 500), ("B0", 600)]
    [event] = of(name="B1", tid=threads["stage 1"])
    assert event["cat"] == "backward" and event["dur"] == pytest.approx(100)
    assert event["args"] == {"stage": 1, "chunk": 1, "wait_us": 0.0}
    spans = {e["name"]: (e["ts"], e["dur"]) for e in of(cat="phase")}
    assert spans == {"forward": (0, 300), "backward": (400, 300), "outputs, loss": (300, 100)}
    assert trace["otherData"]["bubble_frac"] == pytest.approx(1 / 3)
    assert trace["otherData"]["bytes_by_kind"]["forward"] == 16

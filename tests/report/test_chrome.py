"""The trace is valid JSON of the Trace Event Format, with every action where it was."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_gnnpipe.report import chrome_trace
from tests.helpers.steps import make_stats


def load() -> dict[str, Any]:
    stats = make_stats("F0 F1 .. .. .. B1 B0", ".. F0 F1 .. B1 B0 ..", bytes_by_kind={"forward": 8})
    return json.loads(json.dumps(chrome_trace(stats, "epoch 3"), allow_nan=False))


def of(trace: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if fields.items() <= e.items()]


def test_every_event_has_what_the_format_asks_for() -> None:
    trace = load()
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
    assert trace["displayTimeUnit"] == "ms"


def test_actions_are_in_the_thread_of_their_stage() -> None:
    trace = load()
    [names] = [of(trace, name="process_name")]
    assert names[0]["args"] == {"name": "epoch 3"}
    threads = {e["args"]["name"]: e["tid"] for e in of(trace, name="thread_name")}
    assert list(threads) == ["phase", "stage 0", "stage 1"]
    first = [(e["name"], round(e["ts"])) for e in of(trace, ph="X", tid=threads["stage 0"])]
    assert first == [("F0", 0), ("F1", 100), ("B1", 500), ("B0", 600)]
    [event] = of(trace, name="B1", tid=threads["stage 1"])
    assert event["cat"] == "backward" and event["dur"] == pytest.approx(100)
    assert event["args"] == {"stage": 1, "chunk": 1, "wait_us": 0.0}


def test_phases_and_figures_are_told() -> None:
    trace = load()
    spans = {e["name"]: (e["ts"], e["dur"]) for e in of(trace, cat="phase")}
    assert spans == {"forward": (0, 300), "backward": (400, 300), "outputs, loss": (300, 100)}
    assert trace["otherData"]["bubble_frac"] == pytest.approx(1 / 3)
    assert trace["otherData"]["bytes_by_kind"]["forward"] == 16

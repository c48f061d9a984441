"""A measured training step in Chrome's "Trace Event Format", for Perfetto and about:tracing.

Thread 0 shows the phases, thread 1 + r the actions of rank r.
"""

from __future__ import annotations

from typing import Any

from lightning_gnnpipe.chunks import PipelineStats, phases
from lightning_gnnpipe.schedule import Action, Op

_NAMES = {Op.F: "forward", Op.B: "backward"}


def chrome_trace(stats: PipelineStats, title: str = "training step") -> dict[str, Any]:
    """Return the trace of a step, ready for `json.dump`; the viewer shows `title`."""
    return {
        "traceEvents": [*_names(stats, title), *_phases(stats), *_actions(stats)],
        "displayTimeUnit": "ms",
        "otherData": {
            "num_stages": stats.num_stages,
            "num_chunks": stats.num_chunks,
            "is_exact": stats.is_exact,
            "bubble_frac": stats.bubble_frac,
            "wait_s": list(stats.wait_s),
            "bytes_by_kind": stats.bytes_by_kind,
        },
    }


def _names(stats: PipelineStats, title: str) -> list[dict[str, Any]]:
    threads = ["phase", *(" ".join(name) for name in stats.rank_names())]
    named = [_metadata("process_name", 0, name=title)]
    for thread, name in enumerate(threads):
        named.append(_metadata("thread_name", thread, name=name))
        named.append(_metadata("thread_sort_index", thread, sort_index=thread))
    return named


def _metadata(what: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": what, "args": args}


def _phases(stats: PipelineStats) -> list[dict[str, Any]]:
    found = phases(stats.events)
    names = ("forward", "backward") if len(found) == 2 else ("forward and backward",)
    named = list(zip(names, found, strict=False))
    if len(found) == 2:
        named.append(("outputs, loss", (found[0][1], max(found[0][1], found[1][0]))))
    return [_complete(name, "phase", 0, start, end) for name, (start, end) in named]


def _actions(stats: PipelineStats) -> list[dict[str, Any]]:
    found = []
    for event in stats.events:
        action = Action.parse(event.action)
        name = f"{action.op.value}{action.chunk}"
        one = _complete(name, _NAMES[action.op], 1 + event.rank, event.start_us, event.end_us)
        args = {"stage": action.stage, "chunk": action.chunk, "wait_us": event.wait_us}
        found.append(one | {"args": args})
    return found


def _complete(name: str, category: str, thread: int, start: float, end: float) -> dict[str, Any]:
    one = {"ph": "X", "pid": 0, "tid": thread, "name": name, "cat": category}
    return one | {"ts": start, "dur": end - start}

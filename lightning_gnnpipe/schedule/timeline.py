"""A simulated step in time: when each action ran, how long stages were idle, what was kept alive.

Times are in the unit of the costs that the simulation was given; at unit costs, compute actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gnnpipe.schedule.action import Action, Op


@dataclass(frozen=True, slots=True)
class Event:
    """One action in time.

    Attributes:
        action: What ran.
        start: When it started; of a receive, when it was posted.
        end: When it ended; of a transfer, when the data arrived.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All actions of one step in time, and what follows from them.

    Attributes:
        events: The actions, ordered by start, then by stage.
        span: When the last action ends; the first starts at 0.
        busy: For each stage the time in which it computes.
        peak_live: For each stage the largest number of chunks whose forward has run and whose
            backward has not: what the stage must keep in memory. Without a backward phase all
            chunks count, though nothing needs to be kept.
    """

    events: tuple[Event, ...]
    span: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def bubble_frac(self) -> float:
        """Share of all stages' time in which they do not compute.

        At unit costs, fill-drain has `(S - 1) / (K + S - 1)`.
        """
        total = len(self.busy) * self.span
        return (total - sum(self.busy)) / total if total else 0.0

    @classmethod
    def of(cls, events: Iterable[Event], *, num_stages: int) -> Timeline:
        """Return the timeline of `events`, given in the order in which each stage ran them."""
        given = list(events)
        busy, live, peak_live = [0.0] * num_stages, [0] * num_stages, [0] * num_stages
        for event in given:
            if event.action.op.is_compute:
                stage = event.action.stage
                busy[stage] += event.end - event.start
                live[stage] += 1 if event.action.op is Op.F else -1
                peak_live[stage] = max(peak_live[stage], live[stage])
        return cls(
            events=tuple(sorted(given, key=lambda event: (event.start, event.action.stage))),
            span=max((event.end for event in given), default=0.0),
            busy=tuple(busy),
            peak_live=tuple(peak_live),
        )

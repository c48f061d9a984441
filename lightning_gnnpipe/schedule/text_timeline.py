"""A simulated step in time: when each action ran, how long ranks were idle, what was kept alive.

Times are in the unit of the costs that the simulation was given; at unit costs, compute actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_gnnpipe.schedule.action import Action, Op


@dataclass(frozen=True, slots=True)
class Event:
    """One action in time.

    Attributes:
        action: What ran.
        rank: Where it ran.
        start: When it started; of a receive, when it was posted.
        end: When it ended; of a transfer, when the data arrived.
    """

    action: Action
    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All actions of one step in time, and what follows from them.

    Attributes:
        events: The actions, ordered by start, then by rank.
        span: When the last action ends; the first starts at 0.
        busy: For each rank the time in which it computes.
        peak_live: For each rank the largest number of chunks whose forward has run and whose
            backward has not: what the rank must keep in memory. A chunk counts once for each stage
            of the rank that holds it. It depends on the order of the rank's list, not on costs.
        lets_go: Whether a chunk is let go when its forward ends: so in a stream, a schedule without
            a backward phase whose chunks do not wait for a common loss. In other schedules without
            a backward phase all chunks count, as if one were to follow.
    """

    events: tuple[Event, ...]
    span: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]
    lets_go: bool = False

    @property
    def bubble_frac(self) -> float:
        """Share of all ranks' time in which they do not compute.

        At unit costs, fill-drain and 1F1B have `(S - 1) / (K + S - 1)`.
        """
        total = len(self.busy) * self.span
        return (total - sum(self.busy)) / total if total else 0.0

    def peak_bytes(self, bytes_of: Callable[[Action], float]) -> tuple[float, ...]:
        """Return for each rank the most bytes of activations that it keeps at a time.

        Those of a chunk count from its `F` on a stage up to its `B` there, as in `peak_live`. What
        is on its way between ranks comes on top, see `add_transfers`.

        Args:
            bytes_of: The bytes that an `F` keeps, given the action.
        """
        return tuple(_peaks(self.events, len(self.busy), bytes_of, self.lets_go))

    @classmethod
    def of(cls, events: Iterable[Event], *, num_ranks: int, lets_go: bool = False) -> Timeline:
        """Return the timeline of `events`, given in the order in which each rank ran them."""
        given = list(events)
        busy = [0.0] * num_ranks
        for event in given:
            if event.action.op.is_compute:
                busy[event.rank] += event.end - event.start
        return cls(
            events=tuple(sorted(given, key=lambda event: (event.start, event.rank))),
            span=max((event.end for event in given), default=0.0),
            busy=tuple(busy),
            peak_live=tuple(map(int, _peaks(given, num_ranks, lambda _: 1.0, lets_go))),
            lets_go=lets_go,
        )


def _peaks(
    events: Iterable[Event], num_ranks: int, size_of: Callable[[Action], float], lets_go: bool
) -> list[float]:
    """Return for each rank the largest sum of what it holds; `events` are in its order."""
    held, peaks = [0.0] * num_ranks, [0.0] * num_ranks
    for event in events:
        action, rank = event.action, event.rank
        if action.op is Op.F:
            size = size_of(action)
            held[rank] += size
            peaks[rank] = max(peaks[rank], held[rank])
            held[rank] -= size if lets_go else 0.0
        elif action.op is Op.B:
            held[rank] -= size_of(Action(action.stage, Op.F, action.chunk))
    return peaks

"""Timeline of a simulated step: times of actions, idle share, memory peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_gnnpipe.schedule.action import Action, Op


@dataclass(frozen=True, slots=True)
class Event:
    """One action in time; a receive starts when posted, a transfer ends when its data arrives."""

    action: Action
    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All actions of one step in time, in the unit of the costs given to `simulate`.

    Attributes:
        events: The actions, ordered by start, then by rank.
        span: When the last action ends; the first starts at 0.
        busy: For each rank, its compute time.
        peak_live: For each rank, the largest number of chunks whose forward has run and whose
            backward has not, which the rank keeps in memory. A chunk counts once for each stage of
            the rank that holds it. Depends on the order of actions, not on costs.
        lets_go: Whether a chunk is freed when its forward ends, as in `stream`: no backward phase,
            and no loss on all chunks. Other schedules without backward keep all chunks, as if one
            followed.
    """

    events: tuple[Event, ...]
    span: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]
    lets_go: bool = False

    @property
    def bubble_frac(self) -> float:
        """Idle share of all ranks' time.

        `(S - 1) / (K + S - 1)` for fill-drain and 1F1B at unit costs.
        """
        total = len(self.busy) * self.span
        return (total - sum(self.busy)) / total if total else 0.0

    def peak_bytes(self, bytes_of: Callable[[Action], float]) -> tuple[float, ...]:
        """Return for each rank the peak bytes of activations.

        Activations of a chunk count from its `F` on a stage to its `B` there, as in `peak_live`.
        Buffers of open transfers are not included, see `add_transfers`.

        Args:
            bytes_of: Returns the bytes that an `F` keeps.
        """
        return tuple(_peaks(self.events, len(self.busy), bytes_of, self.lets_go))

    @classmethod
    def of(cls, events: Iterable[Event], *, num_ranks: int, lets_go: bool = False) -> Timeline:
        """Return the timeline of `events`; events of one rank must be in the order they ran."""
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
    """Return for each rank the peak of the summed sizes of its live chunks."""
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

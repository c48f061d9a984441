"""The schedules of training on batches of graphs, by their number of micro-batches."""

from __future__ import annotations

from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.schedule import Schedule, add_transfers, fill_drain, interleaved
from lightning_gnnpipe.types import ScheduleName


class BatchSchedules:
    """The schedules of a run, each made once.

    Args:
        name: Which.
    """

    def __init__(self, name: ScheduleName) -> None:
        self.name = name
        self._made: dict[tuple[int, int, int], Schedule] = {}

    @property
    def alternates(self) -> bool:
        """Whether micro-batches go back before all have come out."""
        return self.name != "fill_drain"

    def get(self, num_ranks: int, num_virtual: int, num_chunks: int) -> Schedule:
        """Return the schedule, with transfers, of so many micro-batches.

        Args:
            num_ranks: Ranks along the pipe axis.
            num_virtual: Stages of each.
            num_chunks: Micro-batches.
        """
        key = num_ranks, num_virtual, num_chunks
        if key not in self._made:
            if self.alternates:  # with one stage a rank, interleaved is 1F1B
                built = interleaved(num_ranks, num_virtual, num_chunks)
            else:
                built = fill_drain(num_ranks, range(num_chunks))
            self._made[key] = add_transfers(built)
        return self._made[key]


def check_schedule(name: ScheduleName) -> None:
    """Refuse to train on one graph by a schedule of micro-batches.

    Raises:
        UnsupportedError: If `name` is one.
    """
    if name != "fill_drain":
        raise UnsupportedError(
            explain(
                expected=f"batches of graphs where schedule={name!r}",
                found="one graph, whose chunks go back when all have come out, since they depend "
                "on each other",
                remedy="Use schedule='fill_drain'.",
            )
        )

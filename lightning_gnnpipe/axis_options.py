"""Options of the axes that processes are dealt out to, and of schedules: which go together."""

from __future__ import annotations

from typing import Any

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.types import ScheduleName


def check_axes(
    data_parallel: object, graph_parallel: object, schedule: ScheduleName, num_virtual: object
) -> None:
    """Refuse what cannot be right, whatever the graphs and the devices are.

    Args:
        data_parallel: Replicas.
        graph_parallel: Shards of the graph; it has been checked by itself.
        schedule: Of batches of graphs; likewise.
        num_virtual: Stages of each rank.

    Raises:
        ConfigError: With the option.
    """
    if not is_count(data_parallel):
        found, remedy = data_parallel, "1 gives all processes the same batches."
        _refuse("'data_parallel' to be at least 1", found, remedy)
    if data_parallel != 1 and graph_parallel != 1:
        _refuse(
            "'graph_parallel' to be 1 with data_parallel, which is for batches of graphs",
            graph_parallel,
            "Graphs of a batch are not split: use more stages, or more replicas.",
        )
    if not is_count(num_virtual):
        _refuse("'num_virtual' to be at least 1", num_virtual, "Leave it at 2.")
    if schedule != "fill_drain" and graph_parallel != 1:
        _refuse(
            f"'graph_parallel' to be 1 where schedule={schedule!r}",
            graph_parallel,
            "Only batches of graphs can go back early, and they have no shards.",
        )


def is_count(value: object) -> bool:
    """Whether `value` is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _refuse(expected: str, found: Any, remedy: str) -> None:
    raise ConfigError(explain(expected=expected, found=str(found), remedy=remedy))

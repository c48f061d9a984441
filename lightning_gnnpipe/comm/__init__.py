"""All communication between ranks: transport, collectives, process groups."""

from __future__ import annotations

from lightning_gnnpipe.comm.collectives import (
    UNKNOWN_BYTES,
    Collectives,
    Meter,
    cause_of,
    is_communication_error,
)
from lightning_gnnpipe.comm.groups import (
    GPU_BACKEND,
    Members,
    Mesh,
    World,
    abandon_groups,
    choose_wire,
    end_groups_at_exit,
    first_rank_tells,
    restart_store,
)
from lightning_gnnpipe.comm.transport import Exchange, Label, Transport, sum_along_pipe

__all__ = [
    "GPU_BACKEND",
    "UNKNOWN_BYTES",
    "Collectives",
    "Exchange",
    "Label",
    "Members",
    "Mesh",
    "Meter",
    "Transport",
    "World",
    "abandon_groups",
    "cause_of",
    "choose_wire",
    "end_groups_at_exit",
    "first_rank_tells",
    "is_communication_error",
    "restart_store",
    "sum_along_pipe",
]

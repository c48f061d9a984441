"""All communication between ranks: transport, collectives, process groups."""

from lightning_gnnpipe.comm.collectives import (
    Collectives,
    Meter,
    cause_of,
    is_communication_error,
)
from lightning_gnnpipe.comm.groups import (
    GPU_BACKEND,
    Mesh,
    World,
    abandon_groups,
    choose_wire,
    end_groups_at_exit,
    restart_store,
    store_after_failure,
)
from lightning_gnnpipe.comm.transport import Label, Transport

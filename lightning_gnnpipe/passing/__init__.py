"""How an unmodified PyG layer runs on one chunk: message passing intercepted, the rest row-wise."""

from __future__ import annotations

from lightning_gnnpipe.passing.context import MessageContext
from lightning_gnnpipe.passing.intercept import (
    Intercepted,
    find_convs,
    find_layers,
    intercept,
)
from lightning_gnnpipe.passing.interfaces import CallKey, HaloStore
from lightning_gnnpipe.passing.memory import guard_losses, without_memory
from lightning_gnnpipe.passing.native import NativeContext, uses_batch_statistics
from lightning_gnnpipe.passing.statistics import tracks_statistics
from lightning_gnnpipe.passing.support import check_graph_batches, check_norms, check_support
from lightning_gnnpipe.passing.tape import Tape

__all__ = [
    "CallKey",
    "HaloStore",
    "Intercepted",
    "MessageContext",
    "NativeContext",
    "Tape",
    "check_graph_batches",
    "check_norms",
    "check_support",
    "find_convs",
    "find_layers",
    "guard_losses",
    "intercept",
    "tracks_statistics",
    "uses_batch_statistics",
    "without_memory",
]

"""Histories of rows, and the methods for stale rows."""

from lightning_gnnpipe.staleness.copies import FreeTables, HostCopies
from lightning_gnnpipe.staleness.exact import ExactStore, NotYet
from lightning_gnnpipe.staleness.method import (
    DENSE,
    METHODS,
    HistoryOptions,
    StalenessMethod,
    name_method,
)
from lightning_gnnpipe.staleness.moments import (
    MomentStore,
    RowMoments,
    float_of,
)
from lightning_gnnpipe.staleness.store import (
    NEVER,
    GradientBuffer,
    HistoryStore,
    Staleness,
    StalenessRecorder,
    StepOrder,
)

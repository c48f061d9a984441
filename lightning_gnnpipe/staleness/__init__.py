"""Histories of rows, and the methods for stale rows."""

from __future__ import annotations

from lightning_gnnpipe.staleness.method import (
    DENSE,
    METHODS,
    HistoryOptions,
    StalenessMethod,
    name_method,
)
from lightning_gnnpipe.staleness.moments import MomentStore, RowMoments, mean_and_var, sums_by_chunk
from lightning_gnnpipe.staleness.recorder import Staleness, StalenessRecorder
from lightning_gnnpipe.staleness.store import HistoryStore

__all__ = [
    "DENSE",
    "METHODS",
    "HistoryOptions",
    "HistoryStore",
    "MomentStore",
    "RowMoments",
    "Staleness",
    "StalenessMethod",
    "StalenessRecorder",
    "mean_and_var",
    "name_method",
    "sums_by_chunk",
]

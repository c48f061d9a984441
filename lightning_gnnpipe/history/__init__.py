"""Histories: the last value that every message-passing call received, one row a node."""

from __future__ import annotations

from lightning_gnnpipe.history.drift import Staleness, StalenessRecorder
from lightning_gnnpipe.history.method import DENSE, METHODS, StalenessMethod, name_method
from lightning_gnnpipe.history.moments import (
    MomentStore,
    RowMoments,
    mean_and_var,
    sums_by_chunk,
)
from lightning_gnnpipe.history.options import HistoryOptions
from lightning_gnnpipe.history.saved import SavedHistory
from lightning_gnnpipe.history.store import HistoryStore

__all__ = [
    "DENSE",
    "METHODS",
    "HistoryOptions",
    "HistoryStore",
    "MomentStore",
    "RowMoments",
    "SavedHistory",
    "Staleness",
    "StalenessMethod",
    "StalenessRecorder",
    "mean_and_var",
    "name_method",
    "sums_by_chunk",
]

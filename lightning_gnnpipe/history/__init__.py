"""Histories: the last value that every message-passing call received, one row a node."""

from __future__ import annotations

from lightning_gnnpipe.history.delayed import DelayedGradients
from lightning_gnnpipe.history.drift import Staleness, StalenessRecorder
from lightning_gnnpipe.history.gradients import DroppedGradients, GradientRule
from lightning_gnnpipe.history.method import METHODS, StalenessMethod
from lightning_gnnpipe.history.moments import (
    MomentStore,
    RowMoments,
    mean_and_var,
    sums_by_chunk,
)
from lightning_gnnpipe.history.options import HistoryOptions
from lightning_gnnpipe.history.reads import LastRows, ReadRule, RenewedRows, SnapshotRows
from lightning_gnnpipe.history.saved import SavedGradients, SavedHistory
from lightning_gnnpipe.history.store import HistoryStore
from lightning_gnnpipe.history.weights import LastWeights

__all__ = [
    "METHODS",
    "DelayedGradients",
    "DroppedGradients",
    "GradientRule",
    "HistoryOptions",
    "HistoryStore",
    "LastRows",
    "LastWeights",
    "MomentStore",
    "ReadRule",
    "RenewedRows",
    "RowMoments",
    "SavedGradients",
    "SavedHistory",
    "SnapshotRows",
    "Staleness",
    "StalenessMethod",
    "StalenessRecorder",
    "mean_and_var",
    "sums_by_chunk",
]

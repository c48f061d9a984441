"""Histories: the last value that every message-passing call received, one row a node."""

from __future__ import annotations

from lightning_gnnpipe.history.drift import Staleness, StalenessRecorder
from lightning_gnnpipe.history.moments import Moments
from lightning_gnnpipe.history.options import HistoryOptions
from lightning_gnnpipe.history.saved import SavedHistory
from lightning_gnnpipe.history.store import HistoryStore

__all__ = [
    "HistoryOptions",
    "HistoryStore",
    "Moments",
    "SavedHistory",
    "Staleness",
    "StalenessRecorder",
]

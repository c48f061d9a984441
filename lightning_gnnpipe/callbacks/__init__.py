"""Callbacks: what is done about staleness, and what is seen of it."""

from __future__ import annotations

from lightning_gnnpipe.callbacks.refresh import HistoryRefresh
from lightning_gnnpipe.callbacks.staleness import StalenessMonitor
from lightning_gnnpipe.callbacks.warmup import StalenessWarmup

__all__ = ["HistoryRefresh", "StalenessMonitor", "StalenessWarmup"]

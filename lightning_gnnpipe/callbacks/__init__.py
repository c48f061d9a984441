"""Callbacks that control staleness, and that log staleness, progress and pipeline figures."""

from __future__ import annotations

from lightning_gnnpipe.callbacks.monitor import ChunkProgress, PipelineMonitor, StalenessMonitor
from lightning_gnnpipe.callbacks.staleness import (
    BoundedStaleness,
    EmbeddingRefresh,
    StalenessWarmup,
)
from lightning_gnnpipe.callbacks.timeline import TimelineCallback

__all__ = [
    "BoundedStaleness",
    "ChunkProgress",
    "EmbeddingRefresh",
    "PipelineMonitor",
    "StalenessMonitor",
    "StalenessWarmup",
    "TimelineCallback",
]

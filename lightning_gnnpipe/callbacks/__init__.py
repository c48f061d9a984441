"""Callbacks that control staleness, and that log staleness, progress and pipeline figures."""

from __future__ import annotations

from lightning_gnnpipe.callbacks.halo import BoundedStaleness
from lightning_gnnpipe.callbacks.monitor import PipelineMonitor
from lightning_gnnpipe.callbacks.progress import ChunkProgress
from lightning_gnnpipe.callbacks.refresh import EmbeddingRefresh
from lightning_gnnpipe.callbacks.staleness import StalenessMonitor
from lightning_gnnpipe.callbacks.timeline import TimelineCallback
from lightning_gnnpipe.callbacks.warmup import StalenessWarmup

__all__ = [
    "BoundedStaleness",
    "ChunkProgress",
    "EmbeddingRefresh",
    "PipelineMonitor",
    "StalenessMonitor",
    "StalenessWarmup",
    "TimelineCallback",
]

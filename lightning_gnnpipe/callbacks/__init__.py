"""Callbacks that control staleness, and that log staleness and pipeline figures, or draw a step."""

from __future__ import annotations

from lightning_gnnpipe.callbacks.monitor import PipelineMonitor, StalenessMonitor
from lightning_gnnpipe.callbacks.staleness import (
    BoundedStaleness,
    EmbeddingRefresh,
    StalenessWarmup,
)
from lightning_gnnpipe.callbacks.timeline import TimelineCallback

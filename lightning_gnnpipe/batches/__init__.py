"""Mini-batches of graphs: micro-batches through the pipeline, by 1F1B and interleaved."""

from __future__ import annotations

from lightning_gnnpipe.batches.batch_schedules import check_schedule
from lightning_gnnpipe.batches.batches import BatchPasses, check_replicas
from lightning_gnnpipe.batches.stream import BatchStream

__all__ = [
    "BatchPasses",
    "BatchStream",
    "check_replicas",
    "check_schedule",
]

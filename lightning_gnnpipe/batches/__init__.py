"""Mini-batches of small graphs: training by 1F1B or interleaved stages, and inference."""

from lightning_gnnpipe.batches.batches import BatchPasses, check_replicas, check_schedule
from lightning_gnnpipe.batches.stream import BatchStream

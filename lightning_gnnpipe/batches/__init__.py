"""Mini-batches of small graphs: training and inference in micro-batches of whole graphs."""

from lightning_gnnpipe.batches.batches import BatchPasses, check_replicas

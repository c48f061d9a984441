"""The engine without Lightning: one stage in this process."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Meter, Transport, World
from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.staleness import METHODS, HistoryOptions, StalenessMethod
from lightning_gnnpipe.steps import ChunkOptions, Controls, EngineOptions
from lightning_gnnpipe.types import CrossChunkEdges
from tests.helpers.device import DEVICE


def one_process_engine(
    module: nn.Module,
    *,
    partition: Tensor | str = "metis",
    num_chunks: int | str = "auto",
    method: StalenessMethod = METHODS["constant"],
    recompute: bool = False,
    history_dtype: torch.dtype | None = None,
    history_device: torch.device | None = None,
    self_check: bool = True,
    rank: int = 0,
    num_shards: int = 1,
    cross_edges: CrossChunkEdges = "keep",
) -> PipelineEngine:
    """Return an engine that trains `module` in the chunks of `partition`, `[num_nodes]`.

    `num_chunks` is for batches of graphs, which have the default partition.
    """
    timeout = timedelta(seconds=60)
    world = World(rank, num_shards, DEVICE, timeout)
    transport = Transport(world, (1, num_shards), Meter())
    options = EngineOptions(
        chunks=ChunkOptions(num_chunks, partition, seed=0, cross_edges=cross_edges),
        histories=HistoryOptions(method, recompute, history_dtype, history_device),
        balance="uniform",
        seed=0,
        is_fitting=True,
        self_check=self_check,
    )
    engine = PipelineEngine(module, transport, options, Controls())
    engine.set_step(caller="training")
    return engine

"""The engine without Lightning: one stage in this process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from lightning_gnnpipe.comm import Meter, Transport, World
from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.options import RunOptions
from lightning_gnnpipe.staleness import METHODS, StalenessMethod
from lightning_gnnpipe.steps import Controls
from lightning_gnnpipe.types import Partition
from tests.helpers.device import DEVICE
from tests.helpers.trainers import OptionsWithMethod


def one_process_engine(
    module: nn.Module,
    *,
    partition: Partition = "metis",
    num_chunks: int | Literal["auto"] = "auto",
    method: StalenessMethod = METHODS["constant"],
    recompute: bool = False,
    history_dtype: torch.dtype | None = None,
    history_device: torch.device | None = None,
    table_folder: Path | None = None,
    self_check: bool = True,
    rank: int = 0,
    num_shards: int = 1,
    cuda_graphs: bool = False,
    exact_in_chunks: bool = False,
    num_stages: int = 1,
) -> PipelineEngine:
    """Return an engine that trains `module` in the chunks of `partition`, `[num_nodes]`.

    `num_chunks` is for batches of graphs, which have the default partition. `num_stages`: what the
    options say; with more than one, steps may be stale with `exact_in_chunks` too.
    """
    timeout = timedelta(seconds=60)
    world = World(rank, num_shards, DEVICE, timeout)
    transport = Transport(world, (1, num_shards), Meter())
    given = OptionsWithMethod(
        num_chunks=num_chunks,
        partition=partition,
        graph_parallel=num_shards,
        cuda_graphs=cuda_graphs,
        exact_in_chunks=exact_in_chunks,
        recompute=recompute,
        history_dtype=history_dtype,
        history_device=history_device,
        table_folder=table_folder,
        balance="uniform",
        self_check=self_check,
        given=method,
    )
    engine = PipelineEngine(module, transport, RunOptions(given, num_stages), Controls())
    engine.set_step(caller="training")
    return engine

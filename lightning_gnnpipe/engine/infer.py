"""Exact passes without gradients over one graph, as one chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnnpipe.engine.chunk_run import own_random_stream
from lightning_gnnpipe.engine.model import PipelinedModel
from lightning_gnnpipe.engine.step import Step
from lightning_gnnpipe.engine.step_parts import StepParts
from lightning_gnnpipe.passing import intercept
from lightning_gnnpipe.schedule import add_transfers, fill_drain


def run_exact(parts: StepParts, model: PipelinedModel) -> list[Tensor]:
    """Return the outputs, each `[num_rows, *]`, on every rank.

    Args:
        parts: Of the one-chunk plan. A context with a store writes the histories, one without does
            not.
        model: The pipelined model.
    """
    mesh, device = parts.transport.mesh, parts.transport.world.device
    order = tuple(range(parts.plan.num_chunks))
    num_virtual = len(parts.stages)
    schedule = add_transfers(
        fill_drain(parts.num_stages, order, backward=False, num_virtual=num_virtual)
    )
    with (
        intercept(model.intercepted, parts.context),
        own_random_stream(device),
        torch.no_grad(),
    ):
        return Step(parts).forward(schedule.forward(mesh.stage))

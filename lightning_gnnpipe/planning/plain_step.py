"""Forecast of a plain Trainer's step: the module as PyG runs it, timed on a part of the graph.

The part has the first nodes in the order of the chunks, and all edges that end in them. A source
outside of the part is replaced by a node of the part, so that nodes have as many in-edges as in the
whole graph. The part grows until a step takes long enough to be timed. Time and activations are
then scaled to the whole graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks import counting_saved_bytes, synchronize
from lightning_gnnpipe.fallbacks import Fallbacks
from lightning_gnnpipe.graph import ChunkPlan
from lightning_gnnpipe.layers import find_convs, without_memory
from lightning_gnnpipe.selfcheck import flatten
from lightning_gnnpipe.stages import undisturbed

log = logging.getLogger(__name__)

_FIRST_NODES = 2**12
_LONG_ENOUGH_S = 0.2
_NUM_RUNS = 3


@dataclass(frozen=True, slots=True)
class PlainStep:
    """Seconds of a step, and bytes of its activations, in plain PyG."""

    seconds: float
    saved_bytes: int


def time_plain_step(
    module: nn.Module, call: Call, inputs: Inputs, chunks: ChunkPlan
) -> PlainStep | None:
    """Return the forecast; None if the module does not run on a part of the graph."""
    num_nodes = min(_FIRST_NODES, inputs.num_nodes)
    try:
        with without_memory(find_convs(module)), undisturbed(module), torch.enable_grad():
            while True:
                part = _part(call, inputs, chunks.perm[:num_nodes])
                step = _run(module, call, part)  # also warms up
                if step.seconds >= _LONG_ENOUGH_S or num_nodes == inputs.num_nodes:
                    break
                num_nodes = min(4 * num_nodes, inputs.num_nodes)
            runs = [_run(module, call, part) for _ in range(_NUM_RUNS)]
    except Exception as error:  # weights with one row per node, for instance
        Fallbacks(log).tell(
            f"The module does not run on a part of the graph ({error!r})",
            origin="a plan that shows the step of a plain Trainer",
            to="a plan without it",
        )
        return None
    scale = inputs.num_nodes / num_nodes
    return PlainStep(scale * median(run.seconds for run in runs), round(scale * step.saved_bytes))


def _part(call: Call, inputs: Inputs, nodes: Tensor) -> list[Tensor]:
    """Return the leaves of the call on `nodes` and the edges that end in them."""
    position = torch.arange(inputs.num_nodes, device=nodes.device) % len(nodes)
    position[nodes] = torch.arange(len(nodes), device=nodes.device)
    is_in = torch.zeros(inputs.num_nodes, dtype=torch.bool, device=nodes.device)
    is_in[nodes] = True
    sets = torch.split(inputs.edge_index, list(inputs.edge_sizes), dim=1)
    kept = [is_in[edges[1]].nonzero().flatten() for edges in sets]
    leaves = []
    for kind, number, leaf in zip(inputs.kinds, inputs.edge_sets, call.leaves, strict=True):
        if kind is Kind.NODE:
            leaf = leaf[nodes]
        elif kind is Kind.EDGE:
            leaf = leaf[kept[number]]
        elif kind is Kind.EDGE_INDEX:
            leaf = position[sets[number][:, kept[number]]]
        leaves.append(leaf.detach().requires_grad_(leaf.requires_grad))
    return leaves


def _run(module: nn.Module, call: Call, leaves: Sequence[Tensor]) -> PlainStep:
    """Run forward and backward once."""
    args, kwargs = call.rebuild(tuple(leaves), None)
    given = (*leaves, *module.parameters(), *module.buffers())
    synchronize()
    start = time.perf_counter()
    with counting_saved_bytes(given) as saved:
        outputs = flatten(module.forward(*args, **kwargs))
    roots = [output for output in outputs if output.requires_grad]
    wanted = [p for p in (*module.parameters(), *leaves) if p.requires_grad]
    if roots and wanted:
        grads = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)
    synchronize()
    return PlainStep(time.perf_counter() - start, sum(saved))

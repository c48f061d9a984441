"""Inputs of a forecast: the measured model, the graph, a plain step, the link between devices.

A message of `num_bytes` over a link takes

    seconds = message_s + num_bytes / bytes_per_s

Most of `message_s` is the time to wake up a waiting rank while all cores compute.

Source: Hockney, The communication challenge for MPP (1994).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks import StepCosts, counting_saved_bytes, synchronize
from lightning_gnnpipe.errors import Fallbacks
from lightning_gnnpipe.graph import ChunkPlan, SplitSizes, measure_split, split_chunks
from lightning_gnnpipe.layers import find_convs, without_memory
from lightning_gnnpipe.methods import flatten
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.stages import (
    Layers,
    Stage,
    Value,
    check_counts,
    choose_repeated,
    solve_balance,
    split_layers,
    undisturbed,
)


@dataclass(frozen=True, slots=True)
class ForecastOptions:
    """Settings of a forecast.

    Attributes:
        strategy: Its layout and number of chunks are ignored.
        layout: (stages, shards); None for the best.
        memory_gib: Memory of a rank; None for no limit.
    """

    strategy: StrategyOptions
    num_devices: int
    layout: tuple[int, int] | None
    num_chunks: int
    link: Link
    memory_gib: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A model and a graph, cut and timed.

    Attributes:
        copied_bytes_per_s: See `measure_copies`.
        assignment: `[num_nodes]` the chunk of each node, on the CPU, as the edges are.
        kept_edges: `edge_index` without the edges that are dropped.
        loss_s: Seconds of loss, metrics and their backward.
    """

    module: nn.Module
    layers: Layers
    costs: StepCosts
    copied_bytes_per_s: float
    chunks: ChunkPlan
    assignment: Tensor
    edge_index: Tensor
    kept_edges: Tensor
    batch_bytes: int
    loss_s: float
    plain: PlainStep | None
    options: ForecastOptions

    @property
    def one_device_s(self) -> float:
        """Seconds of a step of the same chunks on one device."""
        return sum(cost.compute_s for cost in self.costs.layers) + self.loss_s

    @property
    def output_bytes(self) -> int:
        """Bytes of the outputs of all nodes."""
        row_bytes = sum(self.layers.values[name].row_bytes for name in self.layers.outputs)
        return row_bytes * self.chunks.num_nodes

    @property
    def plain_bytes(self) -> int | None:
        """Bytes of activations, outputs, batch and weights of a plain Trainer."""
        if self.plain is None:
            return None
        weights = TRAINED * bytes_of(self.module.parameters())
        return self.plain.saved_bytes + self.batch_bytes + 2 * self.output_bytes + weights

    def total_rows(self, kind: Kind, edge_set: int) -> int:
        """Return the number of nodes, or of edges in one edge set."""
        chunks = self.chunks
        return chunks.num_nodes if kind is Kind.NODE else chunks.edge_set(edge_set).num_edges

    def num_rows(self, value: Value, chunk: int) -> int:
        """Return the number of rows of `value` in a chunk."""
        own = self.chunks.edge_set(value.edge_set).chunks[chunk]
        return own.num_nodes if value.kind is Kind.NODE else own.num_edges

    def split(self, num_shards: int) -> SplitSizes:
        """Return the sizes of the pieces of the graph, split as in training."""
        shards = torch.zeros_like(self.assignment)
        if num_shards > 1:
            shards = split_chunks(self.edge_index, self.assignment, num_shards)
        return measure_split(self.kept_edges, self.assignment, shards, num_shards)

    def cut(self, num_stages: int, num_shards: int) -> tuple[Stage, ...]:
        """Return the stages, with layers assigned as in training."""
        layers, options = self.layers, self.options.strategy
        num_layers, balance = len(layers.segments), options.balance
        repeated = choose_repeated(layers, options.repeat_encoder, self.total_rows, num_shards)
        if not isinstance(balance, str) and len(balance) == num_stages:
            counts = check_counts(balance, num_layers, num_stages)
        elif balance == "uniform":
            counts = solve_balance([1.0] * num_layers, num_stages)
        else:
            counts = self.costs.assign_layers(layers, num_stages, repeated)
        return split_layers(layers, counts, repeated)


TRAINED = 4  # a weight, its gradient, two optimizer states


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all `tensors`."""
    return sum(one.nbytes for one in tensors)


# Seconds of a message by gloo between two processes of a machine with two cores, while both
# compute: the median in `examples/benchmarks/prediction`.
MESSAGE_S = 1.4e-3


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a rank: bytes per second each way, and seconds per message of any size."""

    bytes_per_s: float
    message_s: float = MESSAGE_S

    @staticmethod
    def of(gbit_per_s: float, message_s: float = MESSAGE_S) -> Link:
        """Return a link from its speed in Gbit/s, each way."""
        return Link(gbit_per_s * 1e9 / 8, message_s)

    @property
    def gbit_per_s(self) -> float:
        """Speed in Gbit/s, each way."""
        return self.bytes_per_s * 8 / 1e9


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
    """Time the module as PyG runs it on a part of the graph, and scale to the whole graph.

    The part has the first nodes in the order of the chunks, and all edges that end in them. A
    source outside of the part is replaced by a node of the part, so that nodes have as many
    in-edges as in the whole graph. The part grows until a step takes long enough to be timed.
    Returns None if the module does not run on a part of the graph.
    """
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
    given = (*leaves, *module.parameters(), *module.buffers())
    synchronize()
    start = time.perf_counter()
    with counting_saved_bytes(given) as saved:
        outputs = flatten(call.run(module, leaves))
    roots = [output for output in outputs if output.requires_grad]
    wanted = [p for p in (*module.parameters(), *leaves) if p.requires_grad]
    if roots and wanted:
        grads = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, grads, allow_unused=True)
    synchronize()
    return PlainStep(time.perf_counter() - start, sum(saved))

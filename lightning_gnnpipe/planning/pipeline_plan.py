"""Results of a forecast: cuts, times, bytes and memory of a training step, and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_gnnpipe.chunks import LayerCost
from lightning_gnnpipe.report import compare_weights
from lightning_gnnpipe.types import Weights

_MIB = 2**20
_SHORT_CHUNK_S = 2e-3  # below, Python takes a large share of a chunk's time


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage, in a training step over all nodes.

    Attributes:
        first_layer: Index of its first layer, from 0.
        num_layers: Message-passing layers.
        num_parameters: Entries of its weights, shared ones included.
        compute_s: Seconds, forward and backward, of all its shards, repeated layers included.
        memory_bytes: Of its largest shard: histories, gradient buffers, activations, weights,
            gradients and two optimizer states; without the batch and its edges.
    """

    first_layer: int
    num_layers: int
    num_parameters: int
    compute_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """A training step on `num_stages` stages of `num_shards` shards each.

    Attributes:
        num_stages: Stages, S.
        num_shards: Shards of the graph, G.
        num_chunks: Chunks, K.
        step_s: Predicted seconds, without the optimizer.
        bubble_frac: Share of all ranks' time, forward and backward, in which they do not compute.
        step_bytes: Bytes sent in a step, without statistics of norms.
        memory_bytes: Of the largest rank: `StageForecast.memory_bytes`, the batch, and the outputs
            of all nodes with their gradient.
        fits: Whether `memory_bytes` is within the limit.
        bytes_by_weights: `step_bytes` with each value of the strategy's `weights`.
    """

    num_stages: int
    num_shards: int
    num_chunks: int
    step_s: float
    bubble_frac: float
    step_bytes: int
    memory_bytes: int
    fits: bool
    bytes_by_weights: Mapping[Weights, int] = field(default_factory=dict)

    @property
    def layout(self) -> tuple[int, int, int]:
        """Numbers of stages, shards and chunks."""
        return self.num_stages, self.num_shards, self.num_chunks

    @property
    def options(self) -> str:
        """The strategy for this layout, as it is written."""
        shards = f", graph_parallel={self.num_shards}" if self.num_shards > 1 else ""
        return f"Trainer(devices={self.num_stages * self.num_shards}, strategy=GNNPipeStrategy(" + (
            f"num_chunks={self.num_chunks}{shards}))"
        )

    def __str__(self) -> str:
        if self.num_stages * self.num_shards == 1:
            name = "one device"
        elif self.num_stages == 1:
            name = f"graph parallel, {self.num_shards} shards"
        else:
            name = f"pipeline, {self.num_stages} stages"
            name += f" x {self.num_shards} shards" if self.num_shards > 1 else ""
        return f"{name}, {self.num_chunks} chunk{'s' if self.num_chunks > 1 else ''}"


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a model and a graph would be cut, and what a training step would take.

    Attributes:
        num_nodes: Nodes, N.
        num_edges: Edges, E.
        layer_names: Names of the message-passing layers.
        layer_costs: Costs of each layer in a step.
        stages: Forecast of each stage.
        num_shards: Shards of the graph, G: ranks of each stage.
        num_chunks: Chunks, K.
        chunk_rows: Nodes of each chunk.
        chunk_edges: Edges that end in each chunk.
        halo_rows: Nodes of other chunks that each chunk reads.
        edge_cut_frac: Share of the edges between two chunks, dropped or not.
        step_s: Predicted seconds of a step, without the optimizer, on one device per rank. Ranks
            that share a memory's bandwidth are slower.
        loss_s: Part of `step_s` for loss and metrics of all nodes, which every device computes; 0
            if it cannot be timed without a Trainer.
        bubble_frac: Share of all ranks' time, forward and backward, in which they do not compute.
        step_bytes: Bytes sent in a step.
        plain_s: Seconds of a step of a plain Trainer, from the module as PyG runs it; None for a
            graph of more than a million nodes and edges.
        plain_bytes: Memory of a plain Trainer, as `LayoutForecast.memory_bytes`, but without what
            layers use only while they run, such as one message per edge; None if unknown.
        layouts: Forecasts of one device with one chunk, and of all layouts of the devices: graph
            parallelism with one chunk, and several stages, on the same chunks.
        link_gbit_per_s: Link speed assumed, in Gbit/s.
        message_us: Microseconds assumed for a message of any size.
    """

    num_nodes: int
    num_edges: int
    layer_names: tuple[str, ...]
    layer_costs: tuple[LayerCost, ...]
    stages: tuple[StageForecast, ...]
    num_shards: int
    num_chunks: int
    chunk_rows: tuple[int, ...]
    chunk_edges: tuple[int, ...]
    halo_rows: tuple[int, ...]
    edge_cut_frac: float
    step_s: float
    loss_s: float
    bubble_frac: float
    step_bytes: int
    layouts: tuple[LayoutForecast, ...]
    link_gbit_per_s: float
    message_us: float
    plain_s: float | None = None
    plain_bytes: int | None = None

    @property
    def layout(self) -> tuple[int, int, int]:
        """Numbers of stages, shards and chunks of the plan."""
        return len(self.stages), self.num_shards, self.num_chunks

    @property
    def best(self) -> LayoutForecast:
        """The fastest of `layouts` that fits; if none fits, the one with the least memory."""
        return choose_layout(self.layouts)

    @property
    def advice(self) -> tuple[str, ...]:
        """What is fastest, and what speaks against the plan."""
        best, advice = self.best, []
        if not best.fits:
            advice.append(
                "No layout fits into the memory: try recompute, history_dtype or more devices."
            )
        elif self.plain_s is not None and self.plain_s < best.step_s:
            advice.append(f"Fastest: a plain Trainer, {self.plain_s:.3f} s per step.")
        else:
            advice.append(f"Fastest: {best.options}, {best.step_s:.3f} s per step.")
        own = next((one for one in self.layouts if one.layout == self.layout), best)
        if own.num_stages > 1 and own.bytes_by_weights:
            advice.append(compare_weights(own.bytes_by_weights))
        compute_s = sum(stage.compute_s for stage in self.stages)
        chunk_s = compute_s / len(self.stages) / self.num_shards / self.num_chunks
        if self.num_chunks > 1 and chunk_s < _SHORT_CHUNK_S:
            advice.append(
                f"A chunk takes only {chunk_s * 1e3:.1f} ms on a stage: use fewer chunks, or one "
                "device."
            )
        return tuple(advice)

    def __str__(self) -> str:
        return "\n".join([*self._cut_lines(), *self._step_lines(), *self.advice])

    def _cut_lines(self) -> list[str]:
        rows, halo = self.chunk_rows, sum(self.halo_rows)
        lines = [
            f"{self.num_nodes:,} nodes, {self.num_edges:,} edges in {len(rows)} chunks of "
            f"{min(rows):,} to {max(rows):,} nodes, which read {halo:,} of other chunks; "
            f"{self.edge_cut_frac:.1%} of the edges are between chunks",
            f"Layers in stages: {len(self.layer_names)} in {len(self.stages)}",
        ]
        for number, stage in enumerate(self.stages):
            names = self.layer_names[stage.first_layer :][: stage.num_layers]
            lines.append(
                f"stage {number}: {' .. '.join(dict.fromkeys([names[0], names[-1]]))} "
                f"({stage.num_layers}), {stage.num_parameters:,} parameters, "
                f"{stage.compute_s * 1e3:,.0f} ms, {stage.memory_bytes / _MIB:,.0f} MiB"
            )
        return lines

    def _step_lines(self) -> list[str]:
        """Return one line a layout; the layout of the plan is in brackets, the best has a star."""
        rows = [("", "seconds", "bytes", "idle", "MiB")]
        if self.plain_s is not None and self.plain_bytes is not None:
            memory = f"{self.plain_bytes / _MIB:,.0f}"
            rows.append(("  plain Trainer", f"{self.plain_s:.3f}", "0", "", memory))
        for one in self.layouts:
            name = f"[{one}]" if one.layout == self.layout else str(one)
            memory = f"{one.memory_bytes / _MIB:,.0f}" + ("" if one.fits else " (too much)")
            idle = f"{one.bubble_frac:.1%}"
            mark = "* " if one == self.best else "  "
            rows.append((mark + name, f"{one.step_s:.3f}", f"{one.step_bytes:,}", idle, memory))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return [
            f"A training step, with links of {self.link_gbit_per_s:g} Gbit/s and "
            f"{self.message_us:g} us per message:",
            *(
                "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
                for row in rows
            ),
        ]


def choose_layout(layouts: Sequence[LayoutForecast]) -> LayoutForecast:
    """Return the fastest layout that fits; if none fits, the one with the least memory."""
    fitting = [one for one in layouts if one.fits]
    if not fitting:
        return min(layouts, key=lambda one: one.memory_bytes)
    return min(fitting, key=lambda one: one.step_s)

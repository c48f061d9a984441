"""Results of a forecast: cuts, times, bytes and memory of a training step, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gnnpipe.chunks import LayerCost

_FEW_LAYERS = 8
_SHORT_CHUNK_S = 2e-3  # below, Python takes a large share of a chunk's time
_NOTABLY = 0.95  # advise another layout if it takes less than this share of the time


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
        step_s: Predicted seconds, without the optimizer.
        bubble_frac: Share of all ranks' time, forward and backward, in which they do not compute.
        step_bytes: Bytes sent in a step, without statistics of norms.
        memory_bytes: Of the largest rank: `StageForecast.memory_bytes`, the batch, and the outputs
            of all nodes with their gradient.
        fits: Whether `memory_bytes` is within the limit.
    """

    num_stages: int
    num_shards: int
    step_s: float
    bubble_frac: float
    step_bytes: int
    memory_bytes: int
    fits: bool

    @property
    def options(self) -> str:
        """Options of `GNNPipeStrategy` for this layout."""
        return f"num_stages={self.num_stages}, graph_parallel={self.num_shards}"


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
        one_device_s: Predicted seconds of the same chunks on one device.
        plain_s: Predicted seconds of a step of a plain Trainer, from the module as PyG runs it on a
            part of the graph; None if it does not run on a part.
        plain_bytes: Memory of a plain Trainer, as `LayoutForecast.memory_bytes`, but without what
            layers use only while they run, such as one message per edge; None if unknown.
        layouts: Forecasts of all layouts of the devices, on the same chunks. One stage means graph
            parallelism.
        link_gbit_per_s: Link speed assumed, in Gbit/s.
        message_us: Microseconds assumed for a message of any size.
    """

    num_nodes: int
    num_edges: int
    layer_names: tuple[str, ...]
    layer_costs: tuple[LayerCost, ...]
    stages: tuple[StageForecast, ...]
    num_shards: int
    chunk_rows: tuple[int, ...]
    chunk_edges: tuple[int, ...]
    halo_rows: tuple[int, ...]
    edge_cut_frac: float
    step_s: float
    loss_s: float
    bubble_frac: float
    step_bytes: int
    one_device_s: float
    layouts: tuple[LayoutForecast, ...]
    link_gbit_per_s: float
    message_us: float
    plain_s: float | None = None
    plain_bytes: int | None = None

    @property
    def layout(self) -> tuple[int, int]:
        """Numbers of stages and shards of the plan."""
        return len(self.stages), self.num_shards

    @property
    def best(self) -> LayoutForecast:
        """The fastest of `layouts` that fits; if none fits, the one with the least memory."""
        return choose_layout(self.layouts)

    @property
    def advice(self) -> tuple[str, ...]:
        """Arguments against a pipeline here; empty if there are none."""
        advice = []
        (num_stages, num_shards), num_layers = self.layout, len(self.layer_names)
        chunk_s = self.one_device_s / len(self.chunk_rows) / num_stages / num_shards
        if num_stages * num_shards > 1 and self.step_s > 0.9 * self.one_device_s:
            advice.append("The pipeline is hardly faster than one device.")
        advice += self._advise_layout()
        if num_layers < _FEW_LAYERS:
            advice.append(
                f"With only {num_layers} layers shards send few bytes, too: try graph_parallel."
            )
        if chunk_s < _SHORT_CHUNK_S:
            advice.append(
                f"A chunk takes only {chunk_s * 1e3:.1f} ms on a stage: use fewer chunks, or one "
                "device."
            )
        return tuple(advice)

    def _advise_layout(self) -> list[str]:
        best = self.best
        if not best.fits:
            return ["No layout fits into the memory: try recompute, history_dtype or more devices."]
        own = [one for one in self.layouts if (one.num_stages, one.num_shards) == self.layout]
        is_slow = self.step_s * _NOTABLY > best.step_s
        if best in own or not (is_slow or any(not one.fits for one in own)):
            return []
        why = "would be faster" if is_slow else "would fit"
        return [
            f"Another layout {why}, {best.step_s:.3f} s per step: "
            f"GNNPipeStrategy({best.options}, num_chunks={len(self.chunk_rows)})."
        ]


def choose_layout(layouts: Sequence[LayoutForecast]) -> LayoutForecast:
    """Return the fastest layout that fits; if none fits, the one with the least memory."""
    fitting = [one for one in layouts if one.fits]
    if not fitting:
        return min(layouts, key=lambda one: one.memory_bytes)
    return min(fitting, key=lambda one: one.step_s)

"""What a forecast says: cuts, times, bytes and memory of a training step, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_gnnpipe.chunks import LayerCost

_FEW_LAYERS = 8
_SHORT_CHUNK_S = 2e-3  # below it, Python's share of a chunk's time is large
_NOTABLY = 0.95  # another layout is advised where it takes less than this share of the time


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage, in a training step over all nodes.

    Attributes:
        first_layer: Number of its first layer, from 0.
        num_layers: Message-passing layers.
        num_parameters: Numbers in its weights, those that other stages use as well included.
        compute_s: Seconds, forward and backward, of all its shards together; with what it computes
            again of earlier layers.
        memory_bytes: Histories, gradient buffers, activations and weights with two optimizer
            states, of the shard that needs most; the batch and its edges are not in it.
    """

    first_layer: int
    num_layers: int
    num_parameters: int
    compute_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """A training step on so many stages of so many shards each.

    Attributes:
        num_stages: Stages, S.
        num_shards: Shards of the graph, G.
        step_s: Predicted seconds, without the optimizer.
        bubble_frac: Share of all ranks' time, forward and back, in which they do not compute.
        step_bytes: Bytes a step sends; statistics of norms are not in it.
        memory_bytes: Of the rank that needs most: what `StageForecast` says of its shard, and the
            batch and the outputs with their gradient, which every rank has of all nodes.
        fits: Whether that is within the memory given.
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
        """What to write for it, of the options of `GNNPipeStrategy`."""
        return f"num_stages={self.num_stages}, graph_parallel={self.num_shards}"


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a model and a graph would be cut, and what a training step would take.

    Attributes:
        num_nodes: Nodes, N.
        num_edges: Edges, E.
        layer_names: The message-passing layers, by name.
        layer_costs: What each costs in a step.
        stages: The stages.
        num_shards: Shards of the graph, G: ranks of each stage.
        chunk_rows: Nodes of each chunk.
        chunk_edges: Edges that end in each chunk.
        halo_rows: Nodes outside that each chunk reads.
        edge_cut_frac: Share of the edges that join two chunks, whether they are dropped or not.
        step_s: Predicted seconds a training step of the pipeline, without the optimizer, on one
            device a rank: ranks that share a memory's bandwidth slow each other down.
        loss_s: Its part behind the pipelined module: loss and metrics, which every device takes of
            all nodes; 0 if it cannot be timed without a Trainer.
        bubble_frac: Share of all ranks' time, forward and back, in which they do not compute.
        step_bytes: Bytes a step sends.
        one_device_s: Predicted seconds of the same chunks on one device.
        layouts: The same step, on the same chunks, for all ways to assign the devices to stages
            and shards; those with one stage are graph parallelism.
        link_gbit_per_s: The link's speed that times are for.
        message_us: Microseconds of a message, whatever its size, that they are for.
        advice: What speaks against a pipeline here; empty if nothing does.
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
    advice: tuple[str, ...] = field(default=())

    @property
    def layout(self) -> tuple[int, int]:
        """The numbers of stages and shards that the plan is for."""
        return len(self.stages), self.num_shards

    @property
    def best(self) -> LayoutForecast:
        """The fastest of `layouts` that fits; if none does, that which needs least memory."""
        return choose_layout(self.layouts)


def choose_layout(layouts: Sequence[LayoutForecast]) -> LayoutForecast:
    """Return the fastest layout that fits; if none does, that which needs least memory."""
    fitting = [one for one in layouts if one.fits]
    if not fitting:
        return min(layouts, key=lambda one: one.memory_bytes)
    return min(fitting, key=lambda one: one.step_s)


def with_advice(plan: PipelinePlan) -> PipelinePlan:
    """Return `plan` with what speaks against it."""
    advice = []
    (num_stages, num_shards), num_layers = plan.layout, len(plan.layer_names)
    chunk_s = plan.one_device_s / len(plan.chunk_rows) / num_stages / num_shards
    if num_stages * num_shards > 1 and plan.step_s > 0.9 * plan.one_device_s:
        advice.append("The pipeline is hardly faster than one device.")
    advice += _advise_layout(plan)
    if num_layers < _FEW_LAYERS:
        advice.append(f"With {num_layers} layers graph parallelism sends little as well.")
    if chunk_s < _SHORT_CHUNK_S:
        advice.append(
            f"A chunk takes {chunk_s * 1e3:.1f} ms a stage: take fewer chunks, or one device."
        )
    return replace(plan, advice=tuple(advice))


def _advise_layout(plan: PipelinePlan) -> list[str]:
    best = plan.best
    if not best.fits:
        return ["No layout fits into the memory: see recompute, history_dtype and more devices."]
    own = [one for one in plan.layouts if (one.num_stages, one.num_shards) == plan.layout]
    is_slow = plan.step_s * _NOTABLY > best.step_s
    if (best.num_stages, best.num_shards) == plan.layout or not (
        is_slow or any(not one.fits for one in own)
    ):
        return []
    why = "would be faster" if is_slow else "would fit"
    return [
        f"Another layout {why}, {best.step_s:.3f} s a step: "
        f"GNNPipeStrategy({best.options}, num_chunks={len(plan.chunk_rows)})."
    ]

"""What a forecast says: cuts, times, bytes and memory of a training step, and advice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_gnnpipe.engine.costs import LayerCost

_FEW_LAYERS = 8
_SHORT_CHUNK_S = 2e-3  # below it, Python's share of a chunk's time is large


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage, in a training step over all nodes.

    Attributes:
        first_layer: Number of its first layer, from 0.
        num_layers: Message-passing layers.
        num_parameters: Numbers in its weights.
        compute_s: Seconds, forward and backward.
        memory_bytes: Histories, gradient buffers, activations and weights with two optimizer
            states; the batch and its edges are not in it.
    """

    first_layer: int
    num_layers: int
    num_parameters: int
    compute_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a model and a graph would be cut, and what a training step would take.

    Attributes:
        num_nodes: Nodes, N.
        num_edges: Edges, E.
        layer_names: The message-passing layers, by name.
        layer_costs: What each costs in a step.
        stages: The stages.
        chunk_rows: Nodes of each chunk.
        chunk_edges: Edges that end in each chunk.
        halo_rows: Nodes outside that each chunk reads.
        edge_cut_frac: Share of the edges that join two chunks.
        step_s: Predicted seconds a training step of the pipeline, without the optimizer, on one
            device a stage: stages that share a memory's bandwidth slow each other down.
        loss_s: Its part behind the pipelined module: loss and metrics, which every device takes of
            all nodes; 0 if it cannot be timed without a Trainer.
        bubble_frac: Share of all stages' time in which they do not compute.
        step_bytes: Bytes a step sends.
        one_device_s: Predicted seconds of the same chunks on one device.
        graph_parallel_s: Predicted seconds of graph parallelism on as many devices: its share of
            the computing, and its bytes over the link, without overlap.
        graph_parallel_bytes: Bytes that it sends.
        link_gbit_per_s: The link's speed that times are for.
        advice: What speaks against a pipeline here; empty if nothing does.
    """

    num_nodes: int
    num_edges: int
    layer_names: tuple[str, ...]
    layer_costs: tuple[LayerCost, ...]
    stages: tuple[StageForecast, ...]
    chunk_rows: tuple[int, ...]
    chunk_edges: tuple[int, ...]
    halo_rows: tuple[int, ...]
    edge_cut_frac: float
    step_s: float
    loss_s: float
    bubble_frac: float
    step_bytes: int
    one_device_s: float
    graph_parallel_s: float
    graph_parallel_bytes: int
    link_gbit_per_s: float
    advice: tuple[str, ...] = field(default=())


def with_advice(plan: PipelinePlan) -> PipelinePlan:
    """Return `plan` with what speaks against it."""
    advice = []
    num_stages, num_layers = len(plan.stages), len(plan.layer_names)
    chunk_s = plan.one_device_s / len(plan.chunk_rows) / num_stages
    if num_stages > 1 and plan.step_s > 0.9 * plan.one_device_s:
        advice.append("The pipeline is hardly faster than one device.")
    if num_stages > 1 and plan.graph_parallel_s < plan.step_s:
        advice.append("Graph parallelism would be faster over this link.")
    if num_layers < _FEW_LAYERS:
        advice.append(f"With {num_layers} layers graph parallelism sends little as well.")
    if chunk_s < _SHORT_CHUNK_S:
        advice.append(
            f"A chunk takes {chunk_s * 1e3:.1f} ms a stage: take fewer chunks, or one device."
        )
    return replace(plan, advice=tuple(advice))

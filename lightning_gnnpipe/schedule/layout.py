"""A training step on S stages of G shards each, simulated: sizes go in, seconds come out.

    rank (s, g)    layers of stage s, rows of shard g

The ranks of a stage compute their parts of a chunk at once and wait for the slowest. Each of their
layers swaps the rows of neighbouring nodes over the link first, which takes as long as it takes the
rank with the most rows. Left out: the time that a message takes whatever its size, and that the
messages of both axes share one link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import fill_drain
from lightning_gnnpipe.schedule.lower import add_transfers
from lightning_gnnpipe.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class LayoutWork:
    """What ranks have to do in a step; sequences are over S stages, S - 1 cuts, or K chunks.

    Attributes:
        num_shards: Shards, G.
        forward_s: For each stage, seconds over all nodes on one device.
        backward_s: The same, backward.
        halo_row_bytes: For each stage, bytes of one node's row in the exchanges of all its layers,
            forward; as many come back.
        cut_bytes: For each cut and chunk, bytes of the rank that sends most, forward.
        cut_grad_bytes: The same, backward.
        work_fracs: For each chunk, the largest part that a shard has of the work of all nodes.
        halo_rows: For each chunk, the most rows that a shard sends or receives.
        weight_bytes: For each stage, bytes of its weights.
        output_bytes: Bytes of the outputs, which the last stage gives to all ranks.
        loss_s: Seconds between forward and backward, on every rank.
        bytes_per_s: Of the link of each rank, each way.
        waits_for_halo: Whether ranks wait for rows, rather than to use those of the last step.
        tied_bytes: Bytes of the weights that several stages use, once for each stage but the first.
    """

    num_shards: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    halo_row_bytes: Sequence[float]
    cut_bytes: Sequence[Sequence[float]]
    cut_grad_bytes: Sequence[Sequence[float]]
    work_fracs: Sequence[float]
    halo_rows: Sequence[float]
    weight_bytes: Sequence[float]
    output_bytes: float
    loss_s: float
    bytes_per_s: float
    waits_for_halo: bool = True
    tied_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class LayoutTimes:
    """Where the time of a step goes.

    Attributes:
        pipeline_s: Chunks forward and back, with exchanges and idle time.
        output_s: Outputs on their way to all ranks.
        weight_s: Sums of the gradients of weights over shards, and of shared ones over stages.
        loss_s: Loss and metrics.
        bubble_frac: Share of the stages' time in which they neither compute nor exchange rows.
    """

    pipeline_s: float
    output_s: float
    weight_s: float
    loss_s: float
    bubble_frac: float

    @property
    def step_s(self) -> float:
        """Seconds of the step, without the optimizer."""
        return self.pipeline_s + self.output_s + self.weight_s + self.loss_s


def simulate_layout(work: LayoutWork) -> LayoutTimes:
    """Return how long a step takes."""
    num_stages, num_chunks = len(work.forward_s), len(work.work_fracs)
    halo_s = [bytes_ / work.bytes_per_s for bytes_ in work.halo_row_bytes]

    def cost(action: Action) -> float:
        stage, chunk = action.stage, action.chunk
        if action.op is Op.SEND_F:
            return work.cut_bytes[stage][chunk] / work.bytes_per_s
        if action.op is Op.SEND_B:
            return work.cut_grad_bytes[stage - 1][chunk] / work.bytes_per_s
        whole_s = work.forward_s[stage] if action.op is Op.F else work.backward_s[stage]
        waited_s = halo_s[stage] * work.halo_rows[chunk] if work.waits_for_halo else 0.0
        return whole_s * work.work_fracs[chunk] + waited_s

    timeline = simulate(add_transfers(fill_drain(num_stages, tuple(range(num_chunks)))), cost=cost)
    on_link_s = 2 * max(halo_s) * sum(work.halo_rows)  # which computing may hide, at most
    shards = work.num_shards
    return LayoutTimes(
        pipeline_s=max(timeline.span, on_link_s),
        # a tree, from the last stage: who has the rows passes them on
        output_s=math.ceil(math.log2(num_stages * shards)) * work.output_bytes / work.bytes_per_s,
        # over shards a ring: each rank sends and receives 2 (G - 1) / G of the weights;
        # over stages from one to the next, and back
        weight_s=(2 * (shards - 1) / shards * max(work.weight_bytes) + 2 * work.tied_bytes)
        / work.bytes_per_s,
        loss_s=work.loss_s,
        bubble_frac=timeline.bubble_frac,
    )


def factorize(num_devices: int, *, most_stages: int) -> tuple[tuple[int, int], ...]:
    """Return all (num_stages, num_shards) of which the product is `num_devices`."""
    return tuple(
        (stages, num_devices // stages)
        for stages in range(1, min(num_devices, most_stages) + 1)
        if num_devices % stages == 0
    )

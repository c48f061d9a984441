"""A training step on S stages of G shards each, simulated: sizes go in, seconds come out.

    rank (s, g)    layers of stage s, rows of shard g

The ranks of a stage compute their parts of a chunk at once and wait for the slowest. Each of their
layers swaps the rows of neighbouring nodes first: they are gathered and put down, which the rank
does itself, and travel, for which it waits. A message takes `message_s` whatever its size, and its
bytes take the link on top; those to several shards are made one after the other. Left out: that
the messages of both axes share one link, and that ranks of one machine share its memory and cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gnnpipe.schedule import Action, Op, add_transfers, fill_drain, simulate


@dataclass(frozen=True, slots=True)
class LayoutWork:
    """What ranks have to do in a step; sequences are over S stages, S - 1 cuts, or K chunks.

    Attributes:
        num_shards: Shards, G.
        forward_s: For each stage, seconds over all nodes on one device.
        backward_s: The same, backward.
        halo_row_bytes: For each stage, bytes of one node's row in the exchanges of all its layers,
            forward; as many come back.
        num_exchanges: For each stage, exchanges of a chunk, forward; as many come back.
        cut_bytes: For each cut and chunk, bytes of the rank that sends most, forward.
        cut_grad_bytes: The same, backward.
        work_fracs: For each chunk, the largest part that a shard has of the work of all nodes.
        halo_rows: For each chunk, the most rows that a shard sends or receives.
        halo_peers: For each chunk, the most other shards that a shard sends rows to, or gets from.
        weight_bytes: For each stage, bytes of its weights.
        output_bytes: Bytes of the outputs, which the last stage gives to all ranks.
        loss_s: Seconds between forward and backward, on every rank.
        bytes_per_s: Of the link of each rank, each way.
        message_s: Seconds of a message, whatever its size.
        copied_bytes_per_s: Bytes of rows that a rank can gather, or put down where they belong.
        waits_for_halo: Whether ranks wait for rows, rather than to use those of the last step.
        tied_bytes: Bytes of the weights that several stages use, once for each stage but the first.
        num_ties: Messages with gradients of these weights, from stage to stage; as many come back.
    """

    num_shards: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    halo_row_bytes: Sequence[float]
    num_exchanges: Sequence[int]
    cut_bytes: Sequence[Sequence[float]]
    cut_grad_bytes: Sequence[Sequence[float]]
    work_fracs: Sequence[float]
    halo_rows: Sequence[float]
    halo_peers: Sequence[int]
    weight_bytes: Sequence[float]
    output_bytes: float
    loss_s: float
    bytes_per_s: float
    message_s: float
    copied_bytes_per_s: float
    waits_for_halo: bool = True
    tied_bytes: float = 0.0
    num_ties: int = 0

    def compute_s(self, stage: int, chunk: int, *, is_forward: bool) -> float:
        """Return how long the slowest rank of a stage computes."""
        whole_s = self.forward_s if is_forward else self.backward_s
        return whole_s[stage] * self.work_fracs[chunk]

    def copy_s(self, stage: int, chunk: int) -> float:
        """Return how long rows of other ranks are gathered and put down, each way."""
        return self._halo_bytes(stage, chunk) / self.copied_bytes_per_s

    def travel_s(self, stage: int, chunk: int) -> float:
        """Return how long rows of other ranks travel, each way."""
        num_messages = self.num_exchanges[stage] * self.halo_peers[chunk]
        return num_messages * self.message_s + self._halo_bytes(stage, chunk) / self.bytes_per_s

    def _halo_bytes(self, stage: int, chunk: int) -> float:
        return self.halo_row_bytes[stage] * self.halo_rows[chunk]


@dataclass(frozen=True, slots=True)
class LayoutTimes:
    """Where the time of a step goes.

    Attributes:
        pipeline_s: Chunks forward and back, with exchanges and idle time.
        output_s: Outputs on their way to all ranks.
        weight_s: Sums of the gradients of weights over shards, and of shared ones over stages.
        loss_s: Loss and metrics.
        bubble_frac: Share of the ranks' time in `pipeline_s` in which they do not compute.
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
    num_stages, num_chunks, shards = len(work.forward_s), len(work.work_fracs), work.num_shards

    def cost(action: Action) -> float:
        stage, chunk = action.stage, action.chunk
        if action.op is Op.SEND_F:
            return work.cut_bytes[stage][chunk] / work.bytes_per_s
        if action.op is Op.SEND_B:
            return work.cut_grad_bytes[stage - 1][chunk] / work.bytes_per_s
        compute_s = work.compute_s(stage, chunk, is_forward=action.op is Op.F)
        waited_s = work.travel_s(stage, chunk) if work.waits_for_halo else 0.0
        return compute_s + work.copy_s(stage, chunk) + waited_s

    schedule = add_transfers(fill_drain(num_stages, tuple(range(num_chunks))))
    timeline = simulate(schedule, cost=cost, latency=work.message_s)
    stages, chunks = range(num_stages), range(num_chunks)
    on_link_s = 2 * max(sum(work.travel_s(s, c) for c in chunks) for s in stages)
    pipeline_s = max(timeline.span, on_link_s)  # which computing may hide, at most
    idle_s = sum(timeline.span - busy for busy in timeline.busy)
    if work.waits_for_halo:
        idle_s += 2 * sum(work.travel_s(stage, chunk) for stage in stages for chunk in chunks)
    # a tree, from the last stage, for each of its ranks: who has the rows passes them on
    num_rounds = math.ceil(math.log2(num_stages * shards))
    # a ring, all weights at once: each rank sends and receives 2 (G - 1) / G of them
    num_steps = 2 * (shards - 1)
    return LayoutTimes(
        pipeline_s=pipeline_s,
        output_s=num_rounds * (shards * work.message_s + work.output_bytes / work.bytes_per_s),
        weight_s=num_steps * (work.message_s + max(work.weight_bytes) / shards / work.bytes_per_s)
        # from one stage to the next, and back
        + 2 * (work.num_ties * work.message_s + work.tied_bytes / work.bytes_per_s),
        loss_s=work.loss_s,
        bubble_frac=idle_s / (num_stages * timeline.span) if timeline.span else 0.0,
    )


def factorize(num_devices: int, *, most_stages: int) -> tuple[tuple[int, int], ...]:
    """Return all (num_stages, num_shards) of which the product is `num_devices`."""
    return tuple(
        (stages, num_devices // stages)
        for stages in range(1, min(num_devices, most_stages) + 1)
        if num_devices % stages == 0
    )

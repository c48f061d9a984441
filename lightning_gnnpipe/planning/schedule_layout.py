"""Time a training step on S stages of G shards each: sizes in, seconds out.

    rank (s, g)    layers of stage s, rows of shard g

The ranks of a stage compute their parts of a chunk at the same time and wait for the slowest. Each
layer exchanges halo rows first. Gather and scatter occupy the rank; it waits for the transfer.
A message takes `message_s` plus the time of its bytes on the link. Messages to several shards are
sent one after the other. Ignored: messages of both axes share one link, and ranks of one machine
share its memory and cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayoutWork:
    """Work of the ranks in a step; sequences are over S stages, S - 1 cuts, or K chunks.

    Attributes:
        num_shards: Shards, G.
        forward_s: For each stage, seconds over all nodes on one device.
        backward_s: The same, backward.
        halo_row_bytes: For each stage, bytes of one node's row in the exchanges of all its layers,
            forward. Backward has as many.
        num_exchanges: For each stage, exchanges of a chunk, forward. Backward has as many.
        cut_bytes: For each cut and chunk, forward bytes of the rank that sends most.
        cut_grad_bytes: The same, backward.
        work_fracs: For each chunk, the largest part of a shard in the work of all nodes.
        halo_rows: For each chunk, the most rows that a shard sends or receives.
        halo_peers: For each chunk, the most shards that a shard sends rows to or gets them from.
        weight_bytes: For each stage, bytes of its weights.
        output_bytes: Bytes of the outputs, which the last stage sends to all ranks.
        loss_s: Seconds between forward and backward, on every rank.
        bytes_per_s: Link speed of each rank, each way.
        message_s: Seconds of a message of any size.
        copied_bytes_per_s: Bytes of rows per second that a rank gathers or scatters.
        waits_for_halo: Whether ranks wait for halo rows; else they use the rows of the last step.
        tied_bytes: Bytes of weights shared by stages, once for each stage but the first.
        num_ties: Messages with gradients of shared weights, one way.
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
        """Return the seconds that the slowest rank of a stage computes."""
        whole_s = self.forward_s if is_forward else self.backward_s
        return whole_s[stage] * self.work_fracs[chunk]

    def copy_s(self, stage: int, chunk: int) -> float:
        """Return the seconds to gather and scatter halo rows, each way."""
        return self._halo_bytes(stage, chunk) / self.copied_bytes_per_s

    def travel_s(self, stage: int, chunk: int) -> float:
        """Return the seconds to transfer halo rows, each way."""
        num_messages = self.num_exchanges[stage] * self.halo_peers[chunk]
        return num_messages * self.message_s + self._halo_bytes(stage, chunk) / self.bytes_per_s

    def _halo_bytes(self, stage: int, chunk: int) -> float:
        return self.halo_row_bytes[stage] * self.halo_rows[chunk]


@dataclass(frozen=True, slots=True)
class LayoutTimes:
    """Parts of the time of a step.

    Attributes:
        pipeline_s: Forward and backward of all chunks, with exchanges and idle time.
        output_s: Broadcast of the outputs to all ranks.
        weight_s: Sums of weight gradients over shards, and of shared weights over stages.
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
    """Return the times of a step."""
    num_stages, num_chunks, shards = len(work.forward_s), len(work.work_fracs), work.num_shards

    stages, chunks = range(num_stages), range(num_chunks)
    free_s, busy_s = [0.0] * num_stages, 0.0  # when each stage has computed what it has so far

    def run(*, is_forward: bool) -> None:
        """Take all chunks through all stages, in turn."""
        nonlocal busy_s
        cuts = work.cut_bytes if is_forward else work.cut_grad_bytes[::-1]
        arrived_s = [0.0] * num_chunks
        for place, stage in enumerate(stages if is_forward else stages[::-1]):
            link_s = 0.0  # when the link to the next stage is free
            for chunk in chunks if is_forward else chunks[::-1]:
                waited_s = work.travel_s(stage, chunk) if work.waits_for_halo else 0.0
                compute_s = work.compute_s(stage, chunk, is_forward=is_forward)
                own_s = compute_s + work.copy_s(stage, chunk) + waited_s
                busy_s += own_s
                free_s[stage] = max(free_s[stage], arrived_s[chunk]) + own_s
                if place + 1 < num_stages:
                    link_s = max(link_s, free_s[stage]) + cuts[place][chunk] / work.bytes_per_s
                    arrived_s[chunk] = link_s + work.message_s

    run(is_forward=True)
    run(is_forward=False)
    span_s = max(free_s)
    on_link_s = 2 * max(sum(work.travel_s(s, c) for c in chunks) for s in stages)
    pipeline_s = max(span_s, on_link_s)  # at least the transfers of the busiest stage
    idle_s = num_stages * span_s - busy_s
    if work.waits_for_halo:
        idle_s += 2 * sum(work.travel_s(stage, chunk) for stage in stages for chunk in chunks)
    # a broadcast tree for each rank of the last stage: ranks that have the rows pass them on
    num_rounds = math.ceil(math.log2(num_stages * shards))
    # ring all-reduce: each rank sends and receives 2 (G - 1) / G of the weights
    num_steps = 2 * (shards - 1)
    return LayoutTimes(
        pipeline_s=pipeline_s,
        output_s=num_rounds * (shards * work.message_s + work.output_bytes / work.bytes_per_s),
        weight_s=num_steps * (work.message_s + max(work.weight_bytes) / shards / work.bytes_per_s)
        # shared weights: from one stage to the next, and back
        + 2 * (work.num_ties * work.message_s + work.tied_bytes / work.bytes_per_s),
        loss_s=work.loss_s,
        bubble_frac=idle_s / (num_stages * span_s) if span_s else 0.0,
    )


def factorize(num_devices: int, *, most_stages: int) -> tuple[tuple[int, int], ...]:
    """Return all (num_stages, num_shards) whose product is `num_devices`."""
    return tuple(
        (stages, num_devices // stages)
        for stages in range(1, min(num_devices, most_stages) + 1)
        if num_devices % stages == 0
    )

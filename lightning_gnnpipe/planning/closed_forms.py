"""Seconds of a training step on S stages of G shards each, by closed forms.

All K chunks pass S stages, forward and backward, in `(K + S - 1) / K` times what the slowest stage
takes; a link that is slower than the stages sets the pace instead. A message takes
`message_s + num_bytes / bytes_per_s` (Hockney, The communication challenge for MPP, 1994). Several
ranks also exchange short messages before each step, and a stage spends time on receiving a chunk.
Ignored: ranks of one machine share its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Seconds of a message by gloo between two processes of a machine with two cores, while both
# compute: the median in `examples/benchmarks/prediction`.
MESSAGE_S = 1.4e-3
_AGREEING = 5  # short messages a step, by time stamps of two ranks
_LINK_GBIT_PER_S = 10.0  # typical between machines; about that of gloo within one
_EXCHANGE_GBIT_PER_S = 1.0  # that gloo reaches within one, in `examples/benchmarks/scale`


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a rank: bytes per second each way, and seconds per message of any size.

    `exchange_bytes_per_s`: of exchanges between shards, for which all wait; None for the same.
    """

    bytes_per_s: float
    message_s: float = MESSAGE_S
    exchange_bytes_per_s: float | None = None

    @staticmethod
    def of(gbit_per_s: float, message_s: float = MESSAGE_S) -> Link:
        """Return a link from its speed in Gbit/s, each way."""
        return Link(gbit_per_s * 1e9 / 8, message_s)

    def __str__(self) -> str:
        speed, exchanged = (
            8 * (one or 0) / 1e9 for one in (self.bytes_per_s, self.exchange_bytes_per_s)
        )
        shards = f" ({exchanged:g} between shards)" if exchanged else ""
        return f"{speed:g} Gbit/s{shards} and {self.message_s * 1e6:g} us per message"


def usual_link(*, is_gloo: bool, message_s: float = MESSAGE_S) -> Link:
    """Return the link of a rank if its speed is not given."""
    link = Link.of(_LINK_GBIT_PER_S, message_s)
    return replace(link, exchange_bytes_per_s=_EXCHANGE_GBIT_PER_S * 1e9 / 8) if is_gloo else link


@dataclass(frozen=True, slots=True)
class LayoutWork:
    """Work of a step. Of several shards, the slowest, and the one that sends or receives most.

    Attributes:
        num_chunks: Chunks, K.
        compute_s: For each stage, seconds of computing all chunks, forward and backward.
        halo_bytes: For each stage, bytes exchanged between shards, in both phases.
        num_messages: For each stage, the messages of these exchanges.
        cut_bytes: For each of S - 1 cuts, bytes sent, in both phases.
        link: Speed of the links.
        weight_bytes: Bytes of gradients of weights over the busiest link.
        output_bytes: Bytes of the outputs of all nodes.
        num_rounds: Rounds of sending them to all ranks.
        waits_for_halo: Whether ranks wait for exchanges; else they only need to keep up.
        taken_s: Seconds that a stage spends on receiving a chunk.
        stages_at_once: Stages that compute at the same time: ranks of one machine share its cores.
    """

    num_chunks: int
    compute_s: Sequence[float]
    halo_bytes: Sequence[float]
    num_messages: Sequence[int]
    cut_bytes: Sequence[float]
    link: Link
    weight_bytes: float = 0.0
    output_bytes: float = 0.0
    num_rounds: int = 0
    waits_for_halo: bool = True
    taken_s: float = 0.0
    stages_at_once: float = math.inf


def time_layout(work: LayoutWork) -> tuple[float, float]:
    """Return the seconds of a step, and the share of it in which ranks neither compute nor copy."""
    link, num_stages, num_chunks = work.link, len(work.compute_s), work.num_chunks
    exchanged = link.exchange_bytes_per_s or link.bytes_per_s
    halo_s = [
        number * link.message_s + size / exchanged
        for number, size in zip(work.num_messages, work.halo_bytes, strict=True)
    ]
    waited_s = halo_s if work.waits_for_halo else [0.0] * num_stages
    slowest_s = max(a + b for a, b in zip(work.compute_s, waited_s, strict=True))
    pipeline_s = max(
        slowest_s * (num_chunks + num_stages - 1) / num_chunks,
        slowest_s * num_stages / num_chunks + max(work.cut_bytes, default=0.0) / link.bytes_per_s,
        *halo_s,
        sum(work.compute_s) / work.stages_at_once,
    )
    num_waits = 2 * (num_stages - 1) + _AGREEING * (work.num_rounds > 0)
    pipeline_s += num_waits * link.message_s + work.taken_s * num_chunks * (num_stages > 1)
    outputs_s = work.num_rounds * (link.message_s + work.output_bytes / link.bytes_per_s)
    step_s = pipeline_s + outputs_s + work.weight_bytes / link.bytes_per_s
    busy_s = sum(work.compute_s)
    return step_s, 1 - busy_s / (num_stages * pipeline_s) if pipeline_s else 0.0


def num_rounds(num_ranks: int) -> int:
    """Return the rounds of a broadcast: ranks that have the rows pass them on."""
    return math.ceil(math.log2(num_ranks))


def factorize(num_devices: int, *, most_stages: int) -> tuple[tuple[int, int], ...]:
    """Return all (num_stages, num_shards) whose product is `num_devices`."""
    return tuple(
        (stages, num_devices // stages)
        for stages in range(1, min(num_devices, most_stages) + 1)
        if num_devices % stages == 0
    )


def pipeline_bytes(
    *,
    num_nodes: int,
    row_bytes: Sequence[int],
    output_row_bytes: int,
    weight_bytes: int,
    tied_bytes: int = 0,
) -> int:
    """Return bytes of a step: `2 N sum(row_bytes) + (S - 1) (N output_row_bytes + |W| + tied)`.

    Each row crosses each cut, its gradient returns, and the last stage sends the outputs to all
    other stages, as each stage does with the gradients of its weights. `row_bytes`: for each of the
    S - 1 cuts, bytes of one node's rows. `weight_bytes`: bytes of all weights of stages.
    `tied_bytes`: of those in all stages, whose gradients are summed, which sends twice as much.
    """
    to_all = num_nodes * output_row_bytes + weight_bytes + tied_bytes
    return 2 * num_nodes * sum(row_bytes) + len(row_bytes) * to_all


def graph_parallel_bytes(
    *,
    num_layers: int,
    replicas_per_node: float,
    num_nodes: int,
    row_bytes: int,
    weight_bytes: int,
    num_shards: int,
) -> int:
    """Return the bytes of a graph-parallel step: `2 L alpha N row_bytes + 2 (G - 1) |W|`.

    Each layer sends each row to the shards with a replica and gets its gradient back; a ring
    all-reduce of the weights follows. `replicas_per_node` (alpha): mean number of other shards with
    a copy of a node. `row_bytes`: of one node's row in one layer. `weight_bytes`: of all weights.
    """
    num_replicas = round(replicas_per_node * num_nodes)
    return 2 * num_layers * num_replicas * row_bytes + 2 * (num_shards - 1) * weight_bytes

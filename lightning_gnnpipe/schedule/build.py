"""The `Schedule` of a step, and its builders: fill-drain, 1F1B, interleaved 1F1B, streams.

Backward takes the chunks of one graph in reverse order: the readers of a chunk's fresh rows come
before it, so gradients are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.format import format_grid

Loss = Literal["all", "each"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every rank in one step, in order; prints as a grid.

    The functions that build schedules list compute actions only; `add_transfers` adds sends and
    receives.

    Stages are assigned to ranks round-robin. Each round is one virtual stage::

        stage = virtual * num_ranks + rank

    Attributes:
        num_stages: Number of stages.
        order: Chunk order of the forward phase, a permutation of `range(num_chunks)`. A chunk is a
            part of the graph, or a micro-batch of many graphs.
        ranks: For each rank, its actions in the order in which they run.
        loss: Outputs that backward waits for. `"all"`: the outputs of all chunks; backward takes
            the chunks in reverse order, since they may depend on each other. `"each"`: the output
            of the same chunk; backward takes the chunks in forward order, as in 1F1B. Every
            schedule then sums the gradients of a weight in the order of gradient accumulation on
            one device. Fill-drain has the same memory peak with both.
        num_virtual: Stages of each rank.

    Raises:
        ScheduleError: If there is no stage, `order` is not a permutation, `loss` is unknown, or
            `num_stages` is not `num_virtual` times the number of lists in `ranks`.
    """

    num_stages: int
    order: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    loss: Loss = "all"
    num_virtual: int = 1

    def __post_init__(self) -> None:
        """Check the shape; `check` checks the actions."""
        require_order(self.order)
        if self.num_stages < 1 or len(self.ranks) * self.num_virtual != self.num_stages:
            raise ScheduleError(
                expected=f"'num_stages' to be at least 1, and equal to num_virtual "
                f"({self.num_virtual}) times the number of action lists",
                found=f"{self.num_stages} stages, {len(self.ranks)} lists",
                remedy="Build schedules with 'fill_drain', 'one_f_one_b' or 'interleaved'.",
            )
        if self.loss not in get_args(Loss):
            raise ScheduleError(
                expected="'loss' to be 'all' or 'each'",
                found=repr(self.loss),
                remedy="Use 'all' if the loss needs the outputs of all chunks, 'each' if each "
                "chunk has its own loss.",
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.order)

    @property
    def backward_order(self) -> tuple[int, ...]:
        """Chunk order of the backward phase, on every stage."""
        return self.order[::-1] if self.loss == "all" else self.order

    @property
    def has_backward(self) -> bool:
        """Whether any action belongs to the backward phase."""
        return any(action.op.is_backward for rank in self.ranks for action in rank)

    @property
    def has_transfers(self) -> bool:
        """Whether any action is a send or a receive."""
        return any(not action.op.is_compute for rank in self.ranks for action in rank)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds `stage`."""
        return stage % self.num_ranks

    def peer_of(self, transfer: Action) -> int:
        """Return the rank at the other end of a send or receive."""
        return self.rank_of(transfer.partner.stage)

    def crosses_ranks(self, stage: int, other: int) -> bool:
        """Return whether neighbour stage `other` exists and is on another rank than `stage`."""
        return 0 <= other < self.num_stages and self.rank_of(stage) != self.rank_of(other)

    def row_label(self, rank: int) -> str:
        """Return the name of `rank` in text: `stage 0` if it has one stage, else `rank 0`."""
        return f"{'stage' if self.num_virtual == 1 else 'rank'} {rank}"

    def forward(self, rank: int) -> tuple[Action, ...]:
        """Return the forward actions of `rank`, transfers included, in order."""
        return tuple(action for action in self.ranks[rank] if not action.op.is_backward)

    def backward(self, rank: int) -> tuple[Action, ...]:
        """Return the backward actions of `rank`, transfers included, in order."""
        return tuple(action for action in self.ranks[rank] if action.op.is_backward)

    def __str__(self) -> str:
        return format_grid(self)


def fill_drain(
    num_stages: int,
    order: Sequence[int],
    *,
    backward: bool = True,
    loss: Loss = "all",
    num_virtual: int = 1,
) -> Schedule:
    """Return the schedule that runs all chunks forward in `order`, then all backward.

    Three stages, three chunks in the order 2, 0, 1, with a loss on the outputs of all chunks::

        stage 0  F2 F0 F1 .  .  .  .  B1 B0 B2
        stage 1  .  F2 F0 F1 .  .  B1 B0 B2 .
        stage 2  .  .  F2 F0 F1 B1 B0 B2 .  .

    Exact mode is this schedule with one chunk: `fill_drain(num_stages, (0,))`.

    A rank with several stages runs all chunks through its first stage, then all through its second
    ("breadth-first"); backward in reverse. With equal costs it is idle as long as `interleaved`,
    but it holds all chunks on all stages at the loss.

    Args:
        num_stages: Number of stages, at least 1.
        order: Chunk order, a permutation of `range(num_chunks)`.
        backward: Whether to add the backward phase; False for validation, test and predict.
        loss: See `Schedule`. Backward takes chunks in reverse with `"all"`, in order with `"each"`.
        num_virtual: Stages of each rank; must divide `num_stages`.

    Raises:
        ScheduleError: If `order` is not a permutation, or `num_stages` is not a positive multiple
            of `num_virtual`.

    Source: GPipe (arXiv 1811.06965) for the schedule; GNNPipe (arXiv 2308.10087) for its use on
        the chunks of one graph; Lamy-Poirier, "Breadth-First Pipeline Parallelism" (arXiv
        2211.05953), for several stages per rank.
    """
    require_positive("num_virtual", num_virtual)
    num_ranks = num_stages // num_virtual
    back = order if loss == "each" else order[::-1]
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        actions = [Action(stage, Op.F, chunk) for stage in stages for chunk in order]
        if backward:
            actions += [Action(stage, Op.B, chunk) for stage in stages[::-1] for chunk in back]
        ranks.append(tuple(actions))
    return Schedule(num_stages, tuple(order), tuple(ranks), loss, num_virtual)


class StaleRead(NamedTuple):
    """Chunk `reader` reads rows of chunk `source` from an earlier epoch."""

    reader: int
    source: int


def stale_reads(
    order: Sequence[int], sources: Mapping[int, Collection[int]]
) -> tuple[StaleRead, ...]:
    """Return the pairs (reader, source) of chunks with stale reads, sorted.

    A halo row is fresh if its chunk comes earlier in the order, stale if later.

    Args:
        order: Chunk order of the forward phase, a permutation of `range(num_chunks)`.
        sources: For each chunk, the other chunks that its halo rows belong to. A chunk without a
            halo may be left out.

    Raises:
        ScheduleError: If `order` is not a permutation, or `sources` names a chunk not in it.
    """
    require_order(order)
    place = {chunk: place for place, chunk in enumerate(order)}
    pairs = {StaleRead(reader, source) for reader in sources for source in sources[reader]}
    unknown = sorted({chunk for pair in pairs for chunk in pair} - place.keys())
    if unknown:
        raise ScheduleError(
            expected=f"'sources' to name chunks 0 to {len(order) - 1}",
            found=f"chunk {unknown[0]}",
            remedy="Take 'order' and 'sources' from the same chunk plan.",
        )
    return tuple(sorted(pair for pair in pairs if place[pair.source] > place[pair.reader]))


def require_order(order: Sequence[int]) -> None:
    """Raise unless `order` is a permutation of `range(len(order))` and not empty."""
    if not order or sorted(order) != list(range(len(order))):
        raise ScheduleError(
            expected="'order' to hold each of the chunks 0, 1, ..., num_chunks - 1 once",
            found=str(tuple(order)),
            remedy="Give a permutation of range(num_chunks), such as (2, 0, 1).",
        )


def require_positive(name: str, number: int) -> None:
    """Raise unless the argument `name` is at least 1."""
    if number < 1:
        raise ScheduleError(
            expected=f"'{name}' to be at least 1",
            found=str(number),
            remedy="A step needs at least one stage, one rank and one micro-batch.",
        )


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the schedule 1F1B, in which forward and backward alternate.

    Of S stages and K micro-batches, stage s first runs `min(S - s - 1, K)` forwards, then one
    forward and one backward in turn, then the remaining backwards. Three stages, four
    micro-batches::

        stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Its idle time equals that of fill-drain, but stage s holds at most `min(S - s, K)` micro-batches
    instead of K. The pipeline empties at the end of a step, so all gradients are of the same
    weights.

    Raises:
        ScheduleError: If an argument is less than 1.

    Source: PipeDream-Flush in "Memory-Efficient Pipeline-Parallel DNN Training" (Narayanan et al.,
        arXiv 2006.09503); section 2.2.1 of Megatron-LM (arXiv 2104.04473).
    """
    require_positive("num_stages", num_stages)
    return interleaved(num_stages, 1, num_micro_batches)


def interleaved(num_ranks: int, num_virtual: int, num_micro_batches: int) -> Schedule:
    """Return the schedule 1F1B for several stages per rank: less idle time, more transfers.

    A rank runs a round of micro-batches through its first stage, then through its second, and so
    on, then starts the next round; backward in reverse. Two ranks of two stages (stages 0 and 2 on
    rank 0), four micro-batches in two rounds::

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    **Rounds.** There are `max(1, K // P)` rounds. Their sizes differ by at most one, larger rounds
    first. If K is a multiple of P, all have P micro-batches, as in Megatron-LM, which by default
    refuses any other K. With K >= P, no round is smaller than P, so a micro-batch returns from the
    last rank before the first runs out of work: the idle share is `(P - 1) / (V K + P - 1)` for
    equal costs. With K <= P it is `1 - V K / (V P + K - 1)`: one micro-batch passes V P stages,
    K - 1 follow. Megatron-LM divides by the compute time instead: `(P - 1) / (V K)`.

    **Warm-up.** With Q the size of the largest round, rank r runs `(V - 1) Q + 2 (P - r - 1)`
    forwards, at most V K, before it alternates. It then holds one more; each covers one stage, that
    is 1 / V of the rank's layers. With one stage per rank this is `one_f_one_b`.

    Args:
        num_ranks: Number of ranks, P.
        num_virtual: Stages of each rank, V; stage `virtual * num_ranks + rank` is on `rank`.
        num_micro_batches: Number of micro-batches, K.

    Raises:
        ScheduleError: If an argument is less than 1.

    Source: Megatron-LM (arXiv 2104.04473), section 2.2.2, and its `schedules.py` for the warm-up.
        `torch.distributed.pipelining` has the same rounds, but of one size only.
    """
    require_positive("num_ranks", num_ranks)
    require_positive("num_virtual", num_virtual)
    require_positive("num_micro_batches", num_micro_batches)
    num_stages = num_ranks * num_virtual
    rounds = _rounds(num_micro_batches, num_ranks)
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        num_warmup = num_ranks - rank - 1  # the forwards before a rank alternates
        if num_virtual > 1:
            num_warmup = (num_virtual - 1) * len(rounds[0]) + 2 * num_warmup
        forwards = _in_rounds(Op.F, stages, rounds)
        backwards = _in_rounds(Op.B, stages[::-1], rounds)
        # `num_warmup` forwards, then forward and backward in turn, then the rest.
        pairs = list(zip(forwards[num_warmup:], backwards, strict=False))
        in_turn = (action for pair in pairs for action in pair)
        ranks.append((*forwards[:num_warmup], *in_turn, *backwards[len(pairs) :]))
    return Schedule(num_stages, tuple(range(num_micro_batches)), tuple(ranks), "each", num_virtual)


def stream(num_stages: int, num_micro_batches: Sequence[int], *, num_virtual: int = 1) -> Schedule:
    """Return the forward-only schedule of several mini-batches, one after the other.

    The pipeline fills once and is not emptied between mini-batches. Two stages, mini-batches of two
    and three micro-batches, numbered consecutively: 0 and 1, then 2 to 4::

        stage 0  F0 F1 F2 F3 F4 .
        stage 1  .  F0 F1 F2 F3 F4

    K micro-batches take the time of one micro-batch through all stages plus K - 1 times the slowest
    stage. Outputs of faster stages before the slowest queue up for sending. A rank with several
    stages works in rounds as in `interleaved`; a round may span mini-batches.

    Args:
        num_stages: Number of stages.
        num_micro_batches: Number of micro-batches of each mini-batch.
        num_virtual: Stages of each rank; must divide `num_stages`.

    Raises:
        ScheduleError: If a number of micro-batches is less than 1, there is no mini-batch, or
            `num_stages` is not a positive multiple of `num_virtual`.
    """
    require_positive("num_stages", num_stages)
    require_positive("num_virtual", num_virtual)
    for number in num_micro_batches or (0,):
        require_positive("num_micro_batches", number)
    order = range(sum(num_micro_batches))
    num_ranks = num_stages // num_virtual
    rounds = _rounds(len(order), num_ranks)
    ranks = [
        tuple(_in_rounds(Op.F, range(rank, num_stages, num_ranks), rounds))
        for rank in range(num_ranks)
    ]
    return Schedule(num_stages, tuple(order), tuple(ranks), "each", num_virtual)


def _rounds(num_micro_batches: int, num_ranks: int) -> list[range]:
    """Split the micro-batches into rounds of at least `num_ranks`, of nearly equal size."""
    num_rounds = max(1, num_micro_batches // max(1, num_ranks))
    size, num_larger = divmod(num_micro_batches, num_rounds)
    ends = [(i + 1) * size + min(i + 1, num_larger) for i in range(num_rounds)]
    return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def _in_rounds(op: Op, stages: Sequence[int], rounds: Sequence[range]) -> list[Action]:
    return [Action(stage, op, chunk) for each in rounds for stage in stages for chunk in each]

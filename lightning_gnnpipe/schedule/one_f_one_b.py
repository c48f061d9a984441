"""Schedules of independent micro-batches: 1F1B, interleaved 1F1B, and forward-only streams.

Idle share with equal costs on all stages, P ranks of V stages each, K micro-batches:

    (P - 1) / (V K + P - 1)     if K >= P: fill-drain and 1F1B (V = 1), interleaved (V > 1)
    1 - V K / (V P + K - 1)     if K <= P: one micro-batch passes V P stages, K - 1 follow

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (arXiv 2104.04473), section 2.2, for K >= P. It divides by the compute time
    instead: (P - 1) / (V K).
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule, require_positive


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
    equal costs.

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
        ranks.append(_alternate(forwards, backwards, num_warmup))
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


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """Return `num_warmup` forwards, then forward and backward in turn, then the rest."""
    pairs = list(zip(forwards[num_warmup:], backwards, strict=False))
    in_turn = (action for pair in pairs for action in pair)
    return (*forwards[:num_warmup], *in_turn, *backwards[len(pairs) :])

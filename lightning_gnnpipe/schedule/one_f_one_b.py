"""Schedules of independent micro-batches: counts in, a list of actions a rank out.

Micro-batches of many small graphs share no edge, and each has a loss of its own. So a micro-batch
may go back as soon as it has come out, and its activations need not be kept until all have: the
memory of a step no longer grows with the number of micro-batches.

Idle time with equal costs on all stages, R ranks of V stages each, M micro-batches:

    (R - 1) / (V M + R - 1)     if M >= R: fill-drain and 1F1B (V = 1), interleaved (V > 1)
    1 - V M / (V R + M - 1)     if M <= R

The first is "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(Narayanan et al., arXiv 2104.04473, section 2.2), whose bubble is a share of the time without it,
(R - 1) / (V M). The second follows from a micro-batch that goes alone through V R stages, and M - 1
more behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule, require_positive


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the schedule 1F1B, in which forward and backward alternate.

    Stage s first takes `min(S - s - 1, M)` micro-batches forward, then one forward and one back in
    turn, then the rest back. Three stages, four micro-batches::

        stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    It is idle as long as fill-drain is, but stage s holds `min(S - s, M)` micro-batches at the most
    instead of M. All gradients are of the same weights: the step ends when the pipeline is empty.

    Args:
        num_stages: Number of stages, S, one a rank.
        num_micro_batches: Number of micro-batches, M.

    Returns:
        Compute actions only; `add_transfers` adds the sends and receives.

    Raises:
        ScheduleError: If one of them is less than 1.

    Source: PipeDream-Flush in "Memory-Efficient Pipeline-Parallel DNN Training" (Narayanan et al.,
        arXiv 2006.09503); section 2.2.1 of Megatron-LM (arXiv 2104.04473).
    """
    require_positive("num_stages", num_stages)
    require_positive("num_micro_batches", num_micro_batches)
    order = range(num_micro_batches)
    ranks = [
        _alternate(
            [Action(stage, Op.F, chunk) for chunk in order],
            [Action(stage, Op.B, chunk) for chunk in order],
            num_warmup=num_stages - stage - 1,
        )
        for stage in range(num_stages)
    ]
    return Schedule(num_stages, tuple(order), tuple(ranks), "each")


def interleaved(num_ranks: int, num_virtual: int, num_micro_batches: int) -> Schedule:
    """Return the schedule 1F1B for ranks with several stages each: less idle time, more transfers.

    A rank takes a round of micro-batches through its first stage, then through its second, and so
    on, before it turns to the next round; back the other way round. Two ranks of two stages, so
    stages 0 and 2 on rank 0, four micro-batches in two rounds::

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        rank 1  .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    **Rounds.** There are `max(1, M // R)` rounds, of sizes that differ by one at the most, the
    larger ones first. If M is a multiple of R, all have R micro-batches, and the lists are those of
    Megatron-LM, which by default refuses any other M. Since no round is smaller than R (but for
    M < R, where there is one round of M), a micro-batch that has passed the last rank is back at
    the first before that one is out of work: the idle time is the one above for every M.

    **Warm-up.** With G the size of the largest round, rank r runs `(V - 1) G + 2 (R - r - 1)`
    forwards, V M at the most, before it alternates. It then holds one more, each of a stage, so of
    1 / V of its layers. With one stage a rank it is `one_f_one_b`.

    Args:
        num_ranks: Number of ranks, R.
        num_virtual: Stages of each rank, V; stage `virtual * num_ranks + rank` is on `rank`.
        num_micro_batches: Number of micro-batches, M.

    Returns:
        Compute actions only; `add_transfers` adds the sends and receives.

    Raises:
        ScheduleError: If one of them is less than 1.

    Source: Megatron-LM (arXiv 2104.04473), section 2.2.2, and its `schedules.py` for the warm-up.
        The rounds extend those of `torch.distributed.pipelining`, which must be of one size.
    """
    require_positive("num_ranks", num_ranks)
    require_positive("num_virtual", num_virtual)
    require_positive("num_micro_batches", num_micro_batches)
    if num_virtual == 1:
        return one_f_one_b(num_ranks, num_micro_batches)
    num_stages = num_ranks * num_virtual
    rounds = _rounds(num_micro_batches, num_ranks)
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        num_warmup = (num_virtual - 1) * len(rounds[0]) + 2 * (num_ranks - rank - 1)
        forwards = _in_rounds(Op.F, stages, rounds)
        backwards = _in_rounds(Op.B, stages[::-1], rounds)
        ranks.append(_alternate(forwards, backwards, num_warmup))
    return Schedule(num_stages, tuple(range(num_micro_batches)), tuple(ranks), "each", num_virtual)


def stream(num_stages: int, num_micro_batches: Sequence[int], *, num_virtual: int = 1) -> Schedule:
    """Return the forward-only schedule of several mini-batches, one behind the other.

    The pipeline is not emptied between them, so that it fills once. Two stages, mini-batches of two
    and three micro-batches, which are numbered on: 0 and 1, then 2 to 4::

        stage 0  F0 F1 F2 F3 F4 .
        stage 1  .  F0 F1 F2 F3 F4

    With M micro-batches in all, the time is that of one micro-batch through all stages and M - 1
    times the slowest stage. What faster stages before it have made waits to be sent. A rank with
    several stages takes micro-batches through them in rounds, as in `interleaved`, whatever
    mini-batch they belong to.

    Args:
        num_stages: Number of stages.
        num_micro_batches: For each mini-batch its number of micro-batches.
        num_virtual: Stages of each rank, of which `num_stages` is a multiple.

    Returns:
        Compute actions only; `add_transfers` adds the sends and receives.

    Raises:
        ScheduleError: If there is no stage or no micro-batch, or stages cannot be assigned.
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
    """Return the micro-batches in rounds of at least `num_ranks`, as equal as can be."""
    num_rounds = max(1, num_micro_batches // max(1, num_ranks))
    size, num_larger = divmod(num_micro_batches, num_rounds)
    ends = [(i + 1) * size + min(i + 1, num_larger) for i in range(num_rounds)]
    return [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def _in_rounds(op: Op, stages: Sequence[int], rounds: Sequence[range]) -> list[Action]:
    """Return `op` of all chunks of a round on each of `stages` in turn, round after round."""
    return [Action(stage, op, chunk) for each in rounds for stage in stages for chunk in each]


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """Return `num_warmup` forwards, then a forward and a backward in turn, then what is left."""
    num_pairs = len(forwards) - min(num_warmup, len(forwards))
    actions = [*forwards[: len(forwards) - num_pairs]]
    for pair in zip(forwards[len(forwards) - num_pairs :], backwards, strict=False):
        actions += pair
    return (*actions, *backwards[num_pairs:])

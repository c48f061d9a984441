"""Add sends and receives to a schedule of compute actions; transfers overlap with compute.

NCCL runs the transfers between two ranks in one queue, in the order of the calls. If both ranks
send at the same time, as in 1F1B, two different orders deadlock. So both ranks list their transfers
in the order of the sends at unit costs, and post receives as early as that order allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule
from lightning_gnnpipe.schedule.simulate import simulate


def add_transfers(schedule: Schedule, *, lookahead: int = 2) -> Schedule:
    """Return `schedule` with its sends and receives; with one rank there are none.

    Forward phase of stage 1 of 3, order 0, 1, 2, `lookahead=1`::

        1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_F2 1F1 1SEND_F1 1F2 1SEND_F2

    With a loss on all outputs, receives of the backward phase are posted after all forward actions.

    Args:
        schedule: A schedule of compute actions.
        lookahead: How many compute actions ahead a receive is posted. A rank has at most
            `lookahead + 1` open receives, each with its buffer; one more in 1F1B, and `num_ranks +
            max(lookahead, 3)` if interleaved, since both ranks keep to one order. In `fill_drain`
            with several stages a rank, a receive is open for each chunk that arrives while the rank
            computes another stage; the rank keeps these inputs until the loss anyway.

    Raises:
        ScheduleError: If `lookahead` is negative, the schedule already has transfers, or it
            deadlocks without them.

    Source: the order of transfers is that of `_add_send_recv` in `torch.distributed.pipelining`.
    """
    if lookahead < 0:
        raise ScheduleError(
            explain(
                expected="'lookahead' to be 0 or more",
                found=str(lookahead),
                remedy="With 0, a receive is posted just before the action that waits for it.",
            )
        )
    if schedule.has_transfers:
        raise ScheduleError(
            explain(
                expected="a schedule of compute actions",
                found="one that has sends or receives",
                remedy="Call 'add_transfers' once, on what 'fill_drain' or another returns.",
            )
        )
    if schedule.num_ranks == 1:
        return schedule
    ends = _order_transfers(schedule)
    ranks = (_insert(schedule, rank, own, lookahead) for rank, own in enumerate(ends))
    return replace(schedule, ranks=tuple(ranks))


class _End(NamedTuple):
    """A send or receive; `peer` is the rank at the other end.

    `place` is the index, in the rank's list, of the compute action that makes or needs the data.
    """

    action: Action
    peer: int
    place: int

    @property
    def is_send(self) -> bool:
        return self.action.op in (Op.SEND_F, Op.SEND_B)


def _order_transfers(schedule: Schedule) -> list[list[_End]]:
    """Return for each rank its sends and receives, ordered by the time of the send."""
    places = {each: place for rank in schedule.ranks for place, each in enumerate(rank)}
    ends: list[list[_End]] = [[] for _ in schedule.ranks]
    for event in sorted(simulate(schedule).events, key=lambda event: (event.end, event.rank)):
        done = event.action
        is_forward = done.op is Op.F
        target = done.stage + (1 if is_forward else -1)
        if schedule.crosses_ranks(done.stage, target):
            send = Action(done.stage, Op.SEND_F if is_forward else Op.SEND_B, done.chunk)
            peer, waiting = schedule.rank_of(target), Action(target, done.op, done.chunk)
            ends[event.rank].append(_End(send, peer, places[done]))
            ends[peer].append(_End(send.partner, event.rank, places[waiting]))
    return ends


def _insert(
    schedule: Schedule, rank: int, ends: Sequence[_End], lookahead: int
) -> tuple[Action, ...]:
    receives = _place_receives(schedule, rank, ends, lookahead)
    sends = {end.place: end.action for end in ends if end.is_send}
    lowered: list[Action] = []
    for place, action in enumerate(schedule.ranks[rank]):
        lowered += [*receives[place], action]
        if place in sends:
            lowered.append(sends[place])
    return tuple(lowered)


def _place_receives(
    schedule: Schedule, rank: int, ends: Sequence[_End], lookahead: int
) -> dict[int, list[Action]]:
    """Return the receives to post before each compute action of `rank`, by its index.

    A receive stays behind earlier sends to the same rank, and before the next transfer with it.
    """
    border = len(schedule.forward(rank)) if schedule.loss == "all" else 0
    sent: defaultdict[int, int] = defaultdict(int)
    earliest = []
    for end in ends:
        if end.is_send:
            sent[end.peer] = end.place + 1
        is_gradient = end.action.op is Op.RECV_B
        earliest.append(max(sent[end.peer], border) if is_gradient else sent[end.peer])

    latest: dict[int, int] = {}
    receives: defaultdict[int, list[Action]] = defaultdict(list)
    for end, first in zip(reversed(ends), reversed(earliest), strict=True):
        place = end.place
        if not end.is_send:
            place = max(first, min(place - lookahead, latest.get(end.peer, place)))
            receives[place].insert(0, end.action)
        latest[end.peer] = place
    return receives

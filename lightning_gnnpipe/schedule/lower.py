"""Lower a schedule: compute actions in, the same with sends and receives out.

Both are asynchronous: a send is started right behind the action that made its data, a receive is
*posted* some actions ahead of the one that waits for it, so that transfers run while the rank
computes.

Where ranks send in both directions at the same time, as in 1F1B, receives that are posted at will
can deadlock: NCCL runs what two ranks send each other in one queue, in the order in which each of
them has called. So both ranks list the transfers between them in the same order, that in which the
sends start at unit costs. A receive moves ahead as far as that order allows.
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

    With a loss on all outputs, the receives of the backward phase stay behind all actions of the
    forward phase.

    Args:
        schedule: A schedule of compute actions.
        lookahead: How many compute actions ahead a receive is posted. A rank holds at most
            `lookahead + 1` open receives at a time, which is what it costs in memory: one more in
            1F1B, and `num_ranks + max(lookahead, 3)` if interleaved, since both ranks keep to one
            order. In `fill_drain` with several stages a rank they are all that a rank has been sent
            while it was busy with another stage, parts of what it keeps at the loss.

    Raises:
        ScheduleError: If `lookahead` is negative, the schedule has transfers already, or it
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
    """One end of a transfer: a send or a receive.

    Attributes:
        action: The send or receive.
        peer: The rank at the other end.
        place: Of the compute action whose data it sends, or which waits for it, in its rank's list.
    """

    action: Action
    peer: int
    place: int

    @property
    def is_send(self) -> bool:
        """Whether it is the end that sends."""
        return self.action.op in (Op.SEND_F, Op.SEND_B)


def _order_transfers(schedule: Schedule) -> list[list[_End]]:
    """Return for each rank its sends and receives, all in one order of time."""
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
    """Return the list of `rank` with its transfers: sends right behind what made their data."""
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
    """Return the receives that stand before each compute action of `rank`, by its place.

    A receive stands behind all sends to the same rank that come before it in `ends`, and not behind
    the next transfer with that rank.
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

"""Add sends and receives to a schedule, and find when sends have arrived.

NCCL runs the transfers between two ranks in one queue, in the order of the calls. If both ranks
send at the same time, as in 1F1B, two different orders deadlock. So both ranks list their transfers
in the order of the sends at unit costs, and post receives as early as that order allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule
from lightning_gnnpipe.schedule.simulate import simulate

Arrived = dict[Action, tuple[Action, ...]]


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
            with several stages per rank, a receive is open for each chunk that arrives while the
            rank computes another stage; the rank keeps these inputs until the loss anyway.

    Raises:
        ScheduleError: If `lookahead` is negative, the schedule already has transfers, or it
            deadlocks without them.

    Source: the order of transfers is that of `_add_send_recv` in `torch.distributed.pipelining`.
    """
    if lookahead < 0:
        raise ScheduleError(
            expected="'lookahead' to be 0 or more",
            found=str(lookahead),
            remedy="With 0, a receive is posted just before the action that waits for it.",
        )
    if schedule.has_transfers:
        raise ScheduleError(
            expected="a schedule of compute actions",
            found="a schedule that already has sends or receives",
            remedy="Call 'add_transfers' only once.",
        )
    if schedule.num_ranks == 1:
        return schedule
    transfers = _order_transfers(schedule)
    ranks = (_insert(schedule, rank, own, lookahead) for rank, own in enumerate(transfers))
    return replace(schedule, ranks=tuple(ranks))


def _order_transfers(schedule: Schedule) -> list[list[Action]]:
    """Return for each rank its sends and receives, ordered by the time of the send."""
    transfers: list[list[Action]] = [[] for _ in schedule.ranks]
    for event in sorted(simulate(schedule).events, key=lambda event: (event.end, event.rank)):
        send = event.action.send
        if schedule.crosses_ranks(send.stage, send.partner.stage):
            transfers[event.rank].append(send)
            transfers[schedule.peer_of(send)].append(send.partner)
    return transfers


def _insert(
    schedule: Schedule, rank: int, transfers: Sequence[Action], lookahead: int
) -> tuple[Action, ...]:
    receives = _place_receives(schedule, rank, transfers, lookahead)
    sends = {each for each in transfers if each.op.is_send}
    lowered: list[Action] = []
    for place, action in enumerate(schedule.ranks[rank]):
        lowered += [*receives[place], action]
        if action.send in sends:
            lowered.append(action.send)
    return tuple(lowered)


def _place_receives(
    schedule: Schedule, rank: int, transfers: Sequence[Action], lookahead: int
) -> dict[int, list[Action]]:
    """Return the receives to post before each compute action of `rank`, by its index.

    A receive stays behind earlier sends to the same rank, and before the next transfer with it.
    """
    places = {action: place for place, action in enumerate(schedule.ranks[rank])}
    peers = [schedule.peer_of(each) for each in transfers]
    border = len(schedule.forward(rank)) if schedule.loss == "all" else 0
    sent: defaultdict[int, int] = defaultdict(int)
    earliest = []
    for each, peer in zip(transfers, peers, strict=True):
        if each.op.is_send:
            sent[peer] = places[each.served] + 1
        earliest.append(max(sent[peer], border) if each.op is Op.RECV_B else sent[peer])

    latest: dict[int, int] = {}
    receives: defaultdict[int, list[Action]] = defaultdict(list)
    for each, peer, first in reversed(list(zip(transfers, peers, earliest, strict=True))):
        place = places[each.served]
        if not each.op.is_send:
            place = max(first, min(place - lookahead, latest.get(peer, place)))
            receives[place].insert(0, each)
        latest[peer] = place
    return receives


def arrived_sends(schedule: Schedule, rank: int) -> Arrived:
    """Return, for each compute action of `rank`, the sends of `rank` that have arrived by then.

    The sender then frees its buffer. gloo cannot report a completed send without waiting for it.
    Data received from a rank proves that this rank had received its own inputs before::

        rank 0   0F0 0SEND_F0 ........................ 0B0      needs the gradient from 1B0,
        rank 1            1RECV_F0 1F0 1B0 1SEND_B0             which needed 0SEND_F0

    Each send is listed once, at the first action that proves its arrival. Sends that are never
    proven to have arrived are not listed.
    """
    found: Arrived = {}
    seen = [0] * schedule.num_ranks  # for each rank, how many of its actions must have run
    for action in schedule.ranks[rank]:
        source = _source(schedule, action)
        if source is None:
            continue
        peer = schedule.rank_of(source.stage)
        own = schedule.ranks[peer]
        end = own.index(source) + 1
        done = (_source(schedule, each) for each in own[seen[peer] : end])
        sends = tuple(one.send for one in done if one and schedule.rank_of(one.stage) == rank)
        if sends:
            found[action] = sends
        seen[peer] = max(seen[peer], end)
    return found


def _source(schedule: Schedule, action: Action) -> Action | None:
    """Return the compute action on another rank that supplies the data of `action`, or None."""
    stage = action.stage + (-1 if action.op is Op.F else 1)
    if not action.op.is_compute or not schedule.crosses_ranks(action.stage, stage):
        return None
    return Action(stage, action.op, action.chunk)

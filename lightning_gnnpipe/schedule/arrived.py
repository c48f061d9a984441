"""Find sends that are known to have arrived, so that the sender can free their buffers.

Data received from a rank proves that this rank had received its own inputs before::

    rank 0   0F0 0SEND_F0 ........................ 0B0      needs the gradient from 1B0,
    rank 1            1RECV_F0 1F0 1B0 1SEND_B0             which needed 0SEND_F0

A query would block: gloo cannot report a completed send without waiting for it.
"""

from __future__ import annotations

from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule

Arrived = dict[Action, tuple[Action, ...]]


def arrived_sends(schedule: Schedule, rank: int) -> Arrived:
    """Return, for each compute action of `rank`, the sends of `rank` that have arrived by then.

    Each send is listed once, at the first action that proves its arrival. Sends that are never
    proven to have arrived are not listed.
    """
    found: Arrived = {}
    seen = [0] * schedule.num_ranks  # for each rank, how many of its actions must have run
    for action in schedule.ranks[rank]:
        peer, source = _source(schedule, action)
        if source is None:
            continue
        own = schedule.ranks[peer]
        end = own.index(source) + 1
        done = (_source(schedule, each) for each in own[seen[peer] : end])
        sends = tuple(_send_of(one) for from_rank, one in done if one and from_rank == rank)
        if sends:
            found[action] = sends
        seen[peer] = max(seen[peer], end)
    return found


def _source(schedule: Schedule, action: Action) -> tuple[int, Action | None]:
    """Return the rank and action that supply the data of `action`; -1 and None if on this rank."""
    stage = action.stage + (-1 if action.op is Op.F else 1)
    if not action.op.is_compute or not schedule.crosses_ranks(action.stage, stage):
        return -1, None
    return schedule.rank_of(stage), Action(stage, action.op, action.chunk)


def _send_of(made: Action) -> Action:
    return Action(made.stage, Op.SEND_F if made.op is Op.F else Op.SEND_B, made.chunk)

"""Which messages are known to have arrived, and need not be kept any longer by who sent them.

Goes in: a schedule with transfers. Comes out: for each compute action the sends of its rank that
must have been received when it runs. What a rank computes has waited for messages of others, and
these were made after others, which had been received::

    rank 0   0F0 0SEND_F0 ........................ 0B0      the gradient is of what 1F0 has made:
    rank 1            1RECV_F0 1F0 1B0 1SEND_B0             0SEND_F0 has arrived

So nobody has to ask: gloo cannot tell whether a message has left without waiting for it.
"""

from __future__ import annotations

from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule

Arrived = dict[Action, tuple[Action, ...]]


def arrived_sends(schedule: Schedule, rank: int) -> Arrived:
    """Return the sends of `rank` that have arrived by each of its compute actions.

    A send is named at the first action at which that is known; those of which it never is, are not
    named.
    """
    found: Arrived = {}
    seen = [0] * schedule.num_ranks  # how far the list of each rank must have run
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
    """Return the action whose message `action` waits for, and its rank; None if for none."""
    stage = action.stage + (-1 if action.op is Op.F else 1)
    if not action.op.is_compute or not schedule.crosses_ranks(action.stage, stage):
        return -1, None
    return schedule.rank_of(stage), Action(stage, action.op, action.chunk)


def _send_of(made: Action) -> Action:
    """Return what sends the data of a compute action."""
    return Action(made.stage, Op.SEND_F if made.op is Op.F else Op.SEND_B, made.chunk)

"""What schedules must do, said again without the simulator."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from itertools import pairwise

from lightning_gnnpipe.schedule import Action, Op, Schedule


def end_times(schedule: Schedule, cost: Callable[[Action], float]) -> dict[Action, float]:
    """Return when each compute action ends: the longest path that leads to it.

    An edge is a piece of data that an action needs, or the place in its rank's list.
    """
    last, ends = schedule.num_stages - 1, dict[Action, float]()
    previous = {one: before for rank in schedule.ranks for before, one in pairwise(rank)}

    def needs(action: Action) -> list[Action]:
        stage, chunk = action.stage, action.chunk
        if action.op is Op.F:
            return [Action(stage - 1, Op.F, chunk)] if stage else []
        if stage < last:
            return [Action(stage + 1, Op.B, chunk)]
        chunks = schedule.order if schedule.loss == "all" else (chunk,)
        return [Action(last, Op.F, each) for each in chunks]

    stack = [action for rank in schedule.ranks for action in rank]
    while stack:
        action = stack[-1]
        sources = needs(action) + ([previous[action]] if action in previous else [])
        open_sources = [each for each in sources if each not in ends]
        if open_sources:
            stack += open_sources
        else:
            start = max((ends[each] for each in sources), default=0.0)
            ends[stack.pop()] = start + cost(action)
    return ends


def runs_in_one_queue(schedule: Schedule) -> bool:
    """Return whether all ends where two ranks have one queue for both directions.

    Such is NCCL: a rank puts its sends and receives in the queue, in the order of its list, and
    goes on; the queue waits at each of them until the other rank's queue is at its partner.
    """
    cursors = [0] * schedule.num_ranks
    queues: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    done: set[Action] = set()
    receives = (Op.RECV_F, Op.RECV_B)
    awaited = {one.served: one for rank in schedule.ranks for one in rank if one.op in receives}
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, actions in enumerate(schedule.ranks):
            while cursors[rank] < len(actions):
                action = actions[cursors[rank]]
                if not action.op.is_compute:
                    queues[rank, action.partner.stage % schedule.num_ranks].append(action)
                elif action in awaited and awaited[action] not in done:
                    break
                cursors[rank] += 1
                goes_on = True
        for (rank, peer), queue in list(queues.items()):
            other = queues[peer, rank]
            while queue and other and queue[0] == other[0].partner:
                done |= {queue.popleft(), other.popleft()}
                goes_on = True
    is_empty = not any(queues.values())
    return is_empty and cursors == [len(actions) for actions in schedule.ranks]

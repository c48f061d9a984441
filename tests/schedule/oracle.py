"""What schedules must do, said again without the simulator."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from lightning_gnnpipe.schedule import Action, Op, Schedule


def rank_lists(schedule: Schedule) -> dict[Action, Action | None]:
    """Return for each action the one before it in the list of its rank."""
    before: dict[Action, Action | None] = {}
    for rank in schedule.ranks:
        before |= dict(zip(rank, (None, *rank), strict=False))
    return before


def is_receive(action: Action) -> bool:
    return action.op in (Op.RECV_F, Op.RECV_B)


def end_times(schedule: Schedule, cost: Callable[[Action], float]) -> dict[Action, float]:
    """Return when each compute action ends: the longest path that leads to it.

    An edge is a piece of data that an action needs, or the place in its rank's list.
    """
    before, last = rank_lists(schedule), schedule.num_stages - 1
    ends: dict[Action, float] = {}

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
        previous = before[action]
        sources = [*needs(action), *([] if previous is None else [previous])]
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
    awaited = {each.served: each for rank in schedule.ranks for each in rank if is_receive(each)}

    def rank_of(action: Action) -> int:
        return action.stage % schedule.num_ranks

    goes_on = True
    while goes_on:
        goes_on = False
        for rank, actions in enumerate(schedule.ranks):
            while cursors[rank] < len(actions):
                action = actions[cursors[rank]]
                if action.op in (Op.F, Op.B):
                    if action in awaited and awaited[action] not in done:
                        break
                else:
                    queues[rank, rank_of(action.partner)].append(action)
                cursors[rank] += 1
                goes_on = True
        for (rank, peer), queue in list(queues.items()):
            other = queues[peer, rank]
            while queue and other and queue[0] == other[0].partner:
                done |= {queue.popleft(), other.popleft()}
                goes_on = True
    is_empty = not any(queues.values())
    return is_empty and cursors == [len(actions) for actions in schedule.ranks]

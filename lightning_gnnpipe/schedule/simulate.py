"""Simulate a schedule without devices, by the rules of the engine.

Each rank runs its list in order; only compute occupies it::

    F       waits for its input: its RECV_F, or the F of the previous stage if that stage is on
            the same rank or the schedule has no transfers
    B       waits for its gradient: its RECV_B, or as above the B of the next stage; on the last
            stage for the F of its chunk, or of all chunks with `loss="all"`
    SEND    waits for its data, and does not block the rank
    RECV    posts a buffer, and does not block the rank

Each pair of ranks has one link a direction, which carries one transfer at a time, in the order of
the sends, once both ends are posted. Deadlocks do not depend on costs.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.text_timeline import Event, Timeline

if TYPE_CHECKING:
    from lightning_gnnpipe.schedule.build import Schedule

Cost = Callable[[Action], float]

_Link = tuple[int, int]  # sending rank, receiving rank


def simulate(schedule: Schedule, *, cost: Cost | None = None, latency: float = 0.0) -> Timeline:
    """Return the times at which the actions of `schedule` run.

    Args:
        schedule: Schedule to run, with or without transfers.
        cost: Duration of an `F`, a `B` or a send (the time of the transfer on its link). Default: 1
            for `F` and `B`, 0 for a send.
        latency: Time from when data leaves the link to when it arrives.

    Raises:
        ScheduleError: If the schedule deadlocks (the error names what each rank waits for), or a
            cost is negative or not finite.
    """
    timeline, stuck = simulate_until_stuck(schedule, cost=cost, latency=latency)
    if stuck:
        raise ScheduleError(
            explain(
                expected="every action to get what it waits for",
                found=f"a deadlock: {'; '.join(stuck)}",
                remedy="Each of these actions is missing, or stands too late in its list.",
            )
        )
    return timeline


def simulate_until_stuck(
    schedule: Schedule, *, cost: Cost | None = None, latency: float = 0.0
) -> tuple[Timeline, tuple[str, ...]]:
    """Like `simulate`, but return at a deadlock, with the wait of each stuck rank."""
    run = _Run(schedule, cost or _unit_cost, latency)
    ranks = range(schedule.num_ranks)
    num_ran = -1
    while num_ran:
        num_ran = sum(run.advance(rank) for rank in ranks)
    waits = tuple(wait for rank in ranks if (wait := run.describe_wait(rank)))
    lets_go = schedule.loss == "each" and not schedule.has_backward
    return Timeline.of(run.events, num_ranks=len(ranks), lets_go=lets_go), waits


class _Run:
    """State of a run; the end of each action follows from its inputs, so no event queue is needed.

    `end`: when an action was computed or its data arrived. `posted`: when a rank started its end of
    a transfer. `queues`: for each link, sends that are not carried yet. `loss_lacks`: forwards of
    the last stage that have not run, as an ordered set.
    """

    def __init__(self, schedule: Schedule, cost: Cost, latency: float) -> None:
        self.schedule = schedule
        self.has_transfers = schedule.has_transfers
        self.cost = cost
        self.latency = latency
        self.events: list[Event] = []
        self.now = [0.0] * schedule.num_ranks
        self.cursor = [0] * schedule.num_ranks
        self.end: dict[Action, float] = {}
        self.posted: dict[Action, float] = {}
        self.queues: defaultdict[_Link, deque[Action]] = defaultdict(deque)
        self.link_free: defaultdict[_Link, float] = defaultdict(float)
        last = schedule.num_stages - 1
        self.loss_lacks = {Action(last, Op.F, chunk): None for chunk in schedule.order}

    def advance(self, rank: int) -> int:
        """Run `rank` up to its first action that must wait; return how many actions ran."""
        actions, first = self.schedule.ranks[rank], self.cursor[rank]
        for action in actions[first:]:
            needs = self._needs(action)
            if any(need not in self.end for need in needs):
                break
            start = max([self.now[rank], *(self.end[need] for need in needs)])
            if action.op.is_compute:
                self._compute(action, rank, start)
            else:
                self._post(action, start)
            self.cursor[rank] += 1
        return self.cursor[rank] - first

    def describe_wait(self, rank: int) -> str:
        """Return what `rank` waits for at the end of the run; empty if it is done."""
        actions, place = self.schedule.ranks[rank], self.cursor[rank]
        label = self.schedule.row_label(rank)
        if place < len(actions):
            missing = [str(need) for need in self._needs(actions[place]) if need not in self.end]
            return f"{label} stops at {actions[place]}, which waits for {', '.join(missing)}"
        mine = [each for each in self.posted if self.schedule.rank_of(each.stage) == rank]
        alone = [f"{each}, which waits for {each.partner}" for each in mine if each not in self.end]
        return f"{label} ends with {' and '.join(alone)}" if alone else ""

    def _needs(self, action: Action) -> list[Action]:
        """Return the actions that must end before `action` can run."""
        stage, chunk = action.stage, action.chunk
        is_first, is_last = stage == 0, stage == self.schedule.num_stages - 1
        needs: list[Action] = []
        match action.op:
            case Op.F if not is_first:
                needs = [self._source(action, Op.RECV_F, stage - 1)]
            case Op.B if is_last and self.schedule.loss == "each":
                needs = [Action(stage, Op.F, chunk)]
            case Op.B if is_last:
                needs = list(self.loss_lacks)
            case Op.B:
                needs = [self._source(action, Op.RECV_B, stage + 1)]
            case Op.SEND_F:
                needs = [Action(stage, Op.F, chunk)]
            case Op.SEND_B:
                needs = [Action(stage, Op.B, chunk)]
        return needs

    def _source(self, action: Action, receive: Op, neighbour: int) -> Action:
        if self.has_transfers and self.schedule.crosses_ranks(action.stage, neighbour):
            return Action(action.stage, receive, action.chunk)
        return Action(neighbour, action.op, action.chunk)

    def _compute(self, action: Action, rank: int, start: float) -> None:
        end = start + self._price(action)
        self.now[rank] = self.end[action] = end
        self.events.append(Event(action, rank, start, end))
        self.loss_lacks.pop(action, None)

    def _post(self, action: Action, time: float) -> None:
        """Post one end of a transfer; carry the transfers of its link that have both ends."""
        self.posted[action] = time
        send = action if action.op in (Op.SEND_F, Op.SEND_B) else action.partner
        rank_of = self.schedule.rank_of
        link = (rank_of(send.stage), rank_of(send.partner.stage))
        if action == send:
            self.queues[link].append(send)
        queue = self.queues[link]
        while queue and queue[0].partner in self.posted:
            self._carry(queue.popleft(), link)

    def _carry(self, send: Action, link: _Link) -> None:
        receive = send.partner
        start = max(self.link_free[link], self.posted[send], self.posted[receive])
        left = start + self._price(send)
        end = left + self.latency
        self.link_free[link], self.end[send], self.end[receive] = left, end, end
        self.events += [
            Event(send, link[0], start, end),
            Event(receive, link[1], self.posted[receive], end),
        ]

    def _price(self, action: Action) -> float:
        price = self.cost(action)
        if not 0 <= price < math.inf:
            raise ScheduleError(
                explain(
                    expected="costs to be finite and 0 or more",
                    found=f"{price} for {action}",
                    remedy="Mend the function given as 'cost'.",
                )
            )
        return price


def _unit_cost(action: Action) -> float:
    return float(action.op.is_compute)

"""Run a schedule without devices: actions and costs in, a `Timeline` out, or the deadlock met.

The rules are those of the engine. Each rank runs its list in order; only computing occupies it::

    F       waits for the chunk's input: its RECV_F; the F one stage before, if that stage is on
            the same rank, or in a schedule without transfers
    B       waits for the gradient: its RECV_B, or as above the B one stage behind; on the last
            stage for the loss: for the F of its chunk, or of all chunks, as the schedule says
    SEND    waits for nothing but the data that it sends, and does not hold up the rank
    RECV    posts a buffer, and does not hold up the rank

A transfer takes place once its send was started and its receive posted. Two ranks have one link a
direction, which carries the transfers one after another in the order of the sends; each arrives
some time, the latency, after it has left the link.

No rule looks at the time: whether a schedule deadlocks depends on its lists alone, so that one run
tells it for all costs.
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

_Link = tuple[int, int]  # the rank that sends, the rank that receives


def simulate(schedule: Schedule, *, cost: Cost | None = None, latency: float = 0.0) -> Timeline:
    """Return when each action of `schedule` runs.

    Args:
        schedule: What to run, with or without transfers.
        cost: How long an action takes. Asked for `F` and `B`, and for sends, whose cost is that
            of the transfer. Default: 1 for `F` and `B`, 0 for a transfer.
        latency: From when a transfer has left its link to when it has arrived.

    Raises:
        ScheduleError: If the schedule deadlocks, with what each rank waits for; if a cost is
            negative or not finite.
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
    """Return the timeline as far as the schedule runs, and for each stuck rank what it waits for.

    Args:
        schedule: What to run.
        cost: As for `simulate`.
        latency: As for `simulate`.
    """
    run = _Run(schedule, cost or _unit_cost, latency)
    ranks = range(schedule.num_ranks)
    num_ran = -1
    while num_ran:
        num_ran = sum(run.advance(rank) for rank in ranks)
    waits = tuple(wait for rank in ranks if (wait := run.describe_wait(rank)))
    lets_go = schedule.loss == "each" and not schedule.has_backward
    return Timeline.of(run.events, num_ranks=len(ranks), lets_go=lets_go), waits


class _Run:
    """State of a run. Every end is known once all that it waits for is: no event queue is needed.

    Attributes:
        events: What has run so far; the actions of each rank in order.
        now: For each rank, when it is free.
        cursor: For each rank, the place of its next action.
        end: For each action that ran, when it had its effect: computed, or arrived.
        posted: For each transfer that was started, when.
        queues: For each link, the sends whose transfer has not taken place.
        link_free: For each link, when it is free.
        loss_lacks: The forwards of the last stage that have not run, as an ordered set.
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
        """Run the actions of `rank` up to the first that must wait; return how many ran."""
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
        """Return what `rank` waits for at the end of the run; empty if for nothing."""
        actions, place = self.schedule.ranks[rank], self.cursor[rank]
        label = self.schedule.row_label(rank)
        if place < len(actions):
            missing = [str(need) for need in self._needs(actions[place]) if need not in self.end]
            return f"{label} stops at {actions[place]}, which waits for {', '.join(missing)}"
        mine = [each for each in self.posted if self.schedule.rank_of(each.stage) == rank]
        alone = [f"{each}, which waits for {each.partner}" for each in mine if each not in self.end]
        return f"{label} ends with {' and '.join(alone)}" if alone else ""

    def _needs(self, action: Action) -> list[Action]:
        """Return the actions that must have had their effect before `action` can run."""
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
        """Return what a compute action has its data from: a receive, or another stage directly."""
        if self.has_transfers and self.schedule.crosses_ranks(action.stage, neighbour):
            return Action(action.stage, receive, action.chunk)
        return Action(neighbour, action.op, action.chunk)

    def _compute(self, action: Action, rank: int, start: float) -> None:
        """Run a compute action: it occupies its rank."""
        end = start + self._price(action)
        self.now[rank] = self.end[action] = end
        self.events.append(Event(action, rank, start, end))
        self.loss_lacks.pop(action, None)

    def _post(self, action: Action, time: float) -> None:
        """Start a transfer from one of its ends, and let the link carry what has both."""
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
        """Carry a transfer over `link`, after the transfers before it."""
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
        """Return the cost of `action`, checked."""
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
    """Return 1 for a compute action and 0 for a transfer."""
    return float(action.op.is_compute)

"""Run a schedule without devices: actions and costs in, a `Timeline` out, or the deadlock met.

The rules are those of the engine. Each stage runs its list in order; only computing occupies it::

    F       waits for the chunk's input: its RECV_F, or without transfers the F one stage before
    B       waits for the gradient: its RECV_B, or without transfers the B one stage behind;
            on the last stage for the loss, which needs the outputs of all chunks
    SEND    waits for nothing but the data that it sends, and does not hold up the stage
    RECV    posts a buffer, and does not hold up the stage

A transfer takes place once its send was started and its receive posted. Each cut has one link a
direction, which carries its transfers one after another in the order of the sends; each arrives
some time, the latency, after it has left the link.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.timeline import Event, Timeline

if TYPE_CHECKING:
    from lightning_gnnpipe.schedule.build import Schedule

Cost = Callable[[Action], float]

_Link = tuple[int, Op]  # the stage that sends and the kind of send: one link a cut and direction


def simulate(schedule: Schedule, *, cost: Cost | None = None, latency: float = 0.0) -> Timeline:
    """Return when each action of `schedule` runs.

    Args:
        schedule: What to run, with or without transfers.
        cost: How long an action takes. Asked for `F` and `B`, and for sends, whose cost is that
            of the transfer. Default: 1 for `F` and `B`, 0 for a transfer.
        latency: From when a transfer has left its link to when it has arrived.

    Raises:
        ScheduleError: If the schedule deadlocks, with what each stage waits for; if a cost is
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
    """Return the timeline as far as the schedule runs, and for each stuck stage what it waits for.

    Args:
        schedule: What to run.
        cost: As for `simulate`.
        latency: As for `simulate`.
    """
    run = _Run(schedule, cost or _unit_cost, latency)
    stages = range(schedule.num_stages)
    num_ran = -1
    while num_ran:
        num_ran = sum(run.advance(stage) for stage in stages)
    waits = (run.describe_wait(stage) for stage in stages)
    return Timeline.of(run.events, num_stages=len(stages)), tuple(wait for wait in waits if wait)


class _Run:
    """State of a run. Every end is known once all that it waits for is: no event queue is needed.

    Attributes:
        events: What has run so far; the actions of each stage in order.
        now: For each stage, when it is free.
        cursor: For each stage, the place of its next action.
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
        self.now = [0.0] * schedule.num_stages
        self.cursor = [0] * schedule.num_stages
        self.end: dict[Action, float] = {}
        self.posted: dict[Action, float] = {}
        self.queues: defaultdict[_Link, deque[Action]] = defaultdict(deque)
        self.link_free: defaultdict[_Link, float] = defaultdict(float)
        last = schedule.num_stages - 1
        self.loss_lacks = {Action(last, Op.F, chunk): None for chunk in schedule.order}

    def advance(self, stage: int) -> int:
        """Run the actions of `stage` up to the first that must wait; return how many ran."""
        actions, first = self.schedule.ranks[stage], self.cursor[stage]
        for action in actions[first:]:
            needs = self._needs(action)
            if any(need not in self.end for need in needs):
                break
            start = max([self.now[stage], *(self.end[need] for need in needs)])
            if action.op.is_compute:
                self._compute(action, start)
            else:
                self._post(action, start)
            self.cursor[stage] += 1
        return self.cursor[stage] - first

    def describe_wait(self, stage: int) -> str:
        """Return what `stage` waits for at the end of the run; empty if for nothing."""
        actions, place = self.schedule.ranks[stage], self.cursor[stage]
        if place < len(actions):
            missing = [str(need) for need in self._needs(actions[place]) if need not in self.end]
            return f"stage {stage} stops at {actions[place]}, which waits for {', '.join(missing)}"
        mine = [each for each in self.posted if each.stage == stage]
        alone = [f"{each}, which waits for {each.partner}" for each in mine if each not in self.end]
        return f"stage {stage} ends with {' and '.join(alone)}" if alone else ""

    def _needs(self, action: Action) -> list[Action]:
        """Return the actions that must have had their effect before `action` can run."""
        stage, chunk = action.stage, action.chunk
        is_first, is_last = stage == 0, stage == self.schedule.num_stages - 1
        needs: list[Action] = []
        match action.op:
            case Op.F if not is_first:
                implicit = Action(stage - 1, Op.F, chunk)
                needs = [Action(stage, Op.RECV_F, chunk) if self.has_transfers else implicit]
            case Op.B if is_last:
                needs = list(self.loss_lacks)
            case Op.B:
                implicit = Action(stage + 1, Op.B, chunk)
                needs = [Action(stage, Op.RECV_B, chunk) if self.has_transfers else implicit]
            case Op.SEND_F:
                needs = [Action(stage, Op.F, chunk)]
            case Op.SEND_B:
                needs = [Action(stage, Op.B, chunk)]
        return needs

    def _compute(self, action: Action, start: float) -> None:
        """Run a compute action: it occupies its stage."""
        end = start + self._price(action)
        self.now[action.stage] = self.end[action] = end
        self.events.append(Event(action, start, end))
        self.loss_lacks.pop(action, None)

    def _post(self, action: Action, time: float) -> None:
        """Start a transfer from one of its ends, and let the link carry what has both."""
        self.posted[action] = time
        send = action if action.op in (Op.SEND_F, Op.SEND_B) else action.partner
        link = (send.stage, send.op)
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
        self.events += [Event(send, start, end), Event(receive, self.posted[receive], end)]

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

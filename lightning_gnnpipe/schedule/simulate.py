"""Simulate a schedule without devices, by the rules of the engine; bytes of a step by formula.

Each rank runs its list in order; only compute occupies it. Each pair of ranks has one link a
direction, which carries one transfer at a time, in the order of the sends, once both are posted.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule.action import Action, Op

if TYPE_CHECKING:
    from lightning_gnnpipe.schedule.build import Schedule

Cost = Callable[[Action], float]

_Link = tuple[int, int]  # sending rank, receiving rank


@dataclass(frozen=True, slots=True)
class Event:
    """One action in time; a receive starts when posted, a transfer ends when its data arrives."""

    action: Action
    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """All actions of one step in time, in the unit of the costs given to `simulate`.

    Attributes:
        events: The actions, ordered by start, then by rank.
        span: When the last action ends; the first starts at 0.
        busy: For each rank, its compute time.
        peak_live: For each rank, the largest number of chunks whose forward has run and whose
            backward has not, which the rank keeps in memory. A chunk counts once for each stage of
            the rank that holds it. Depends on the order of actions, not on costs.
        lets_go: Whether a chunk is freed when its forward ends, as in `stream`: no backward phase,
            and no loss on all chunks. Other schedules without backward keep all chunks, as if one
            followed.
    """

    events: tuple[Event, ...]
    span: float
    busy: tuple[float, ...]
    peak_live: tuple[int, ...]
    lets_go: bool = False

    @property
    def bubble_frac(self) -> float:
        """Idle share of all ranks' time.

        `(S - 1) / (K + S - 1)` for fill-drain and 1F1B at unit costs.
        """
        total = len(self.busy) * self.span
        return (total - sum(self.busy)) / total if total else 0.0

    def peak_bytes(self, bytes_of: Callable[[Action], float]) -> tuple[float, ...]:
        """Return for each rank the peak bytes of activations.

        Activations of a chunk count from its `F` on a stage to its `B` there, as in `peak_live`.
        Buffers of open transfers are not included, see `add_transfers`.

        Args:
            bytes_of: Returns the bytes that an `F` keeps.
        """
        return tuple(_peaks(self.events, len(self.busy), bytes_of, self.lets_go))


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
            expected="a schedule without deadlock",
            found="; ".join(stuck),
            remedy="The actions waited for are missing, or too late in their lists.",
        )
    return timeline


def simulate_until_stuck(
    schedule: Schedule, *, cost: Cost | None = None, latency: float = 0.0
) -> tuple[Timeline, tuple[str, ...]]:
    """Like `simulate`, but return at a deadlock, with the wait of each stuck rank."""
    run = _Run(schedule, cost or (lambda action: float(action.op.is_compute)), latency)
    ranks = range(schedule.num_ranks)
    num_ran = -1
    while num_ran:
        num_ran = sum(run.advance(rank) for rank in ranks)
    waits = tuple(wait for rank in ranks if (wait := run.describe_wait(rank)))
    lets_go = schedule.loss == "each" and not schedule.has_backward
    busy = [0.0] * len(ranks)
    for event in run.events:
        if event.action.op.is_compute:
            busy[event.rank] += event.end - event.start
    timeline = Timeline(
        events=tuple(sorted(run.events, key=lambda event: (event.start, event.rank))),
        span=max((event.end for event in run.events), default=0.0),
        busy=tuple(busy),
        peak_live=tuple(map(int, _peaks(run.events, len(ranks), lambda _: 1.0, lets_go))),
        lets_go=lets_go,
    )
    return timeline, waits


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
                end = self.now[rank] = self.end[action] = start + self._price(action)
                self.events.append(Event(action, rank, start, end))
                self.loss_lacks.pop(action, None)
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
        """Return the actions that must end before `action` can run.

        The last stage's B needs the F of its chunk, or with `loss="all"` every F of the stage.
        """
        stage, op, chunk = action.stage, action.op, action.chunk
        if not op.is_compute:
            return [action.served] if op.is_send else []
        source, receive = (stage + 1, Op.RECV_B) if op.is_backward else (stage - 1, Op.RECV_F)
        if 0 <= source < self.schedule.num_stages:
            is_received = self.has_transfers and self.schedule.crosses_ranks(stage, source)
            return [Action(stage, receive, chunk) if is_received else Action(source, op, chunk)]
        if op is Op.B and self.schedule.loss == "all":
            return list(self.loss_lacks)
        return [Action(stage, Op.F, chunk)] if op is Op.B else []

    def _post(self, action: Action, time: float) -> None:
        """Post one end of a transfer; carry the transfers of its link that have both ends."""
        self.posted[action] = time
        send = action if action.op.is_send else action.partner
        link = self.schedule.rank_of(send.stage), self.schedule.peer_of(send)
        if action == send:
            self.queues[link].append(send)
        queue = self.queues[link]
        while queue and queue[0].partner in self.posted:
            send = queue.popleft()
            receive = send.partner
            start = max(self.link_free[link], self.posted[send], self.posted[receive])
            self.link_free[link] = start + self._price(send)
            end = self.end[send] = self.end[receive] = self.link_free[link] + self.latency
            self.events.append(Event(send, link[0], start, end))
            self.events.append(Event(receive, link[1], self.posted[receive], end))

    def _price(self, action: Action) -> float:
        price = self.cost(action)
        if not 0 <= price < math.inf:
            raise ScheduleError(
                expected="costs to be finite and 0 or more",
                found=f"{price} for {action}",
                remedy="Fix the function passed as 'cost'.",
            )
        return price


def _peaks(
    events: Iterable[Event], num_ranks: int, size_of: Callable[[Action], float], lets_go: bool
) -> list[float]:
    """Return for each rank the peak of the summed sizes of its live chunks."""
    held, peaks = [0.0] * num_ranks, [0.0] * num_ranks
    for event in events:
        action, rank = event.action, event.rank
        if action.op is Op.F:
            size = size_of(action)
            held[rank] += size
            peaks[rank] = max(peaks[rank], held[rank])
            held[rank] -= size if lets_go else 0.0
        elif action.op is Op.B:
            held[rank] -= size_of(Action(action.stage, Op.F, action.chunk))
    return peaks


def pipeline_bytes(
    *,
    num_stages: int,
    num_nodes: int,
    row_bytes: Sequence[int],
    output_row_bytes: int,
    tied_bytes: int = 0,
    backward: bool = True,
) -> int:
    """Return the bytes of a pipelined step: `2 N sum(row_bytes) + (S - 1) N output_row_bytes`.

    Each row crosses each cut, its gradient returns, and the last stage sends the outputs to all
    other stages. `row_bytes`: for each cut, bytes of one node's rows. `tied_bytes`: bytes of
    weights shared by several stages, once for each stage but the first; adds `2 tied_bytes`, since
    their gradients are summed from stage to stage and sent back.
    """
    num_cuts = num_stages - 1
    if len(row_bytes) != num_cuts:
        raise ScheduleError(
            expected=f"'row_bytes' to have one entry for each of the {num_cuts} cuts",
            found=f"{len(row_bytes)} entries",
            remedy="There is one cut between any two neighbouring stages.",
        )
    rows = num_nodes * sum(row_bytes)
    gradients = rows + 2 * tied_bytes if backward else 0
    return rows + gradients + num_cuts * num_nodes * output_row_bytes


def graph_parallel_bytes(
    *,
    num_layers: int,
    replicas_per_node: float,
    num_nodes: int,
    row_bytes: int,
    weight_bytes: int,
    num_shards: int,
) -> int:
    """Return the bytes of a graph-parallel step: `2 L alpha N row_bytes + 2 (G - 1) |W|`.

    Each layer sends each row to the shards with a replica and gets its gradient back; a ring
    all-reduce of the weights follows. `replicas_per_node` (alpha): mean number of other shards with
    a copy of a node.
    """
    num_replicas = round(replicas_per_node * num_nodes)
    return 2 * num_layers * num_replicas * row_bytes + 2 * (num_shards - 1) * weight_bytes

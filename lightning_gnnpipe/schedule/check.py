"""Check that a schedule runs the whole step, in a valid order and without a deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule
from lightning_gnnpipe.schedule.simulate import simulate


def check(schedule: Schedule) -> None:
    """Raise unless every stage computes every chunk once, in order, without a deadlock.

    Backward takes the chunks in the schedule's `backward_order`. With a loss on all outputs, it
    follows all forward actions of the rank. Between two ranks each chunk is sent once a phase and
    received in the order of the sends. Both ranks list their transfers in the same order.

    Raises:
        ScheduleError: Names the first action that is in the wrong list, missing, doubled or out of
            order. In a deadlock, names the actions that each rank waits for.
    """
    ranks = range(schedule.num_ranks)
    for rank in ranks:
        _check_members(schedule, rank)
    for rank in ranks if schedule.loss == "all" else ():
        _check_phases(schedule, rank)
    for stage in range(schedule.num_stages):
        for op in Op:
            _check_stream(schedule, stage, op)
    _check_links(schedule)
    simulate(schedule)


def _check_members(schedule: Schedule, rank: int) -> None:
    stages = range(rank, schedule.num_stages, schedule.num_ranks)
    for place, action in enumerate(schedule.ranks[rank]):
        if action.stage not in stages or not 0 <= action.chunk < schedule.num_chunks:
            names = ", ".join(map(str, stages))
            raise _error(
                action,
                expected=f"actions of stage {names} on chunks 0 to {schedule.num_chunks - 1}",
                found=f"{action} at place {place} of {schedule.row_label(rank)}",
            )


def _check_phases(schedule: Schedule, rank: int) -> None:
    """Check that backward starts after the whole forward phase."""
    early: tuple[int, Action] | None = None
    for place, action in enumerate(schedule.ranks[rank]):
        if action.op.is_backward:
            early = early or (place, action)
        elif early is not None:
            label = schedule.row_label(rank)
            raise ScheduleError(
                explain(
                    expected="all backward actions of a rank behind its forward actions, as the "
                    "loss needs the outputs of all chunks",
                    found=f"{early[1]} at place {early[0]} of {label}, before {action}",
                    remedy="Only 'fill_drain' serves such a loss. If every micro-batch has a loss "
                    "of its own, give the schedule loss='each'.",
                )
            )


def _check_stream(schedule: Schedule, stage: int, op: Op) -> None:
    """Check that `stage` runs `op` once on each expected chunk, in order."""
    expected = [Action(stage, op, chunk) for chunk in _expected_chunks(schedule, stage, op)]
    rule = f"the {op.value} of stage {stage} to run through chunks {_chunks(expected)}"
    rank = schedule.rank_of(stage)
    label = schedule.row_label(rank)
    found = [
        (place, each)
        for place, each in enumerate(schedule.ranks[rank])
        if each.op is op and each.stage == stage
    ]
    allowed, seen = set(expected), set[Action]()
    for place, action in found:
        if action in seen or action not in allowed:
            fault = "a second time" if action in seen else "where there is no use for it"
            text = f"{action} {fault}, at place {place} of {label}"
            raise _error(action, expected=rule, found=text)
        seen.add(action)
    for action in expected:
        if action not in seen:
            raise _error(action, expected=rule, found=f"no {action}")
    for (place, action), due in zip(found, expected, strict=True):
        if action != due:
            text = f"{action} at place {place} of {label}, where {due} is due"
            raise _error(action, expected=rule, found=text)


def _check_links(schedule: Schedule) -> None:
    ends: defaultdict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for place, action in enumerate(actions):
            if not action.op.is_compute:
                ends[rank, schedule.rank_of(action.partner.stage)].append((place, action))
    for (rank, peer), own in ends.items():
        for (place, action), (other_place, other) in zip(own, ends[peer, rank], strict=True):
            if rank < peer and other != action.partner:
                raise _error(
                    other,
                    expected="two ranks to list the transfers between them in the same order",
                    found=f"{action} at place {place} of {schedule.row_label(rank)}, but {other} "
                    f"at place {other_place} of {schedule.row_label(peer)}",
                )


def _expected_chunks(schedule: Schedule, stage: int, op: Op) -> tuple[int, ...]:
    neighbour = stage - 1 if op in (Op.RECV_F, Op.SEND_B) else stage + 1
    is_served = schedule.has_transfers and schedule.crosses_ranks(stage, neighbour)
    if not op.is_compute and not is_served:
        return ()
    if op.is_backward:
        return schedule.backward_order if schedule.has_backward else ()
    return schedule.order


def _chunks(actions: Sequence[Action]) -> str:
    return ", ".join(str(action.chunk) for action in actions) or "of which there are none"


def _error(bad: Action, *, expected: str, found: str) -> ScheduleError:
    remedy = f"Look at it with print(format_grid(schedule, bad=Action.parse('{bad}')))."
    return ScheduleError(explain(expected=expected, found=found, remedy=remedy))

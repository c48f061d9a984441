"""Check that a schedule does the whole step: nothing twice, forgotten or out of order, no deadlock.

Passes over schedules are easy to write and easy to get wrong; on devices, what is wrong shows as a
hang or as a wrong number. Here it shows as the first bad action and its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule
from lightning_gnnpipe.schedule.simulate import simulate


def check(schedule: Schedule) -> None:
    """Raise unless every stage computes every chunk once, in order, and gets all that it waits for.

    Raises:
        ScheduleError: Names the first action that is foreign to its list, missing, doubled or out
            of order (the backward runs in reverse order, behind all forward actions; a cut
            carries each chunk once a phase, received in the order in which it is sent), or what
            each stage waits for if the schedule deadlocks.
    """
    for stage in range(schedule.num_stages):
        _check_members(schedule, stage)
        _check_phases(schedule, stage)
        for op in Op:
            _check_stream(schedule, stage, op)
    simulate(schedule)


def _check_members(schedule: Schedule, stage: int) -> None:
    """Check that the list of `stage` holds actions of this stage, on chunks that there are."""
    for place, action in enumerate(schedule.ranks[stage]):
        if action.stage != stage or not 0 <= action.chunk < schedule.num_chunks:
            raise _error(
                action,
                expected=f"actions of stage {stage} on chunks 0 to {schedule.num_chunks - 1}",
                found=f"{action} at place {place} of stage {stage}",
            )


def _check_phases(schedule: Schedule, stage: int) -> None:
    """Check that the backward phase begins when the forward phase has ended."""
    early: tuple[int, Action] | None = None
    for place, action in enumerate(schedule.ranks[stage]):
        if action.op.is_backward:
            early = early or (place, action)
        elif early is not None:
            raise _error(
                early[1],
                expected="all backward actions of a stage behind its forward actions",
                found=f"{early[1]} at place {early[0]} of stage {stage}, before {action}",
            )


def _check_stream(schedule: Schedule, stage: int, op: Op) -> None:
    """Check that the actions of one kind on one stage are those expected, in their order."""
    expected = [Action(stage, op, chunk) for chunk in _expected_chunks(schedule, stage, op)]
    rule = f"the {op.value} of stage {stage} to run through chunks {_chunks(expected)}"
    found = [(i, each) for i, each in enumerate(schedule.ranks[stage]) if each.op is op]
    allowed, seen = set(expected), set[Action]()
    for place, action in found:
        if action in seen or action not in allowed:
            fault = "a second time" if action in seen else "where there is no use for it"
            text = f"{action} {fault}, at place {place} of stage {stage}"
            raise _error(action, expected=rule, found=text)
        seen.add(action)
    for action in expected:
        if action not in seen:
            raise _error(action, expected=rule, found=f"no {action}")
    for (place, action), due in zip(found, expected, strict=True):
        if action != due:
            text = f"{action} at place {place} of stage {stage}, where {due} is due"
            raise _error(action, expected=rule, found=text)


def _expected_chunks(schedule: Schedule, stage: int, op: Op) -> tuple[int, ...]:
    """Return the chunks that `op` must run through on `stage`, in order."""
    is_first, is_last = stage == 0, stage == schedule.num_stages - 1
    crosses_no_cut = is_first if op in (Op.RECV_F, Op.SEND_B) else is_last
    if not op.is_compute and (crosses_no_cut or not schedule.has_transfers):
        return ()
    if op.is_backward:
        return schedule.order[::-1] if schedule.has_backward else ()
    return schedule.order


def _chunks(actions: Sequence[Action]) -> str:
    """Return the chunks of `actions` as text."""
    return ", ".join(str(action.chunk) for action in actions) or "of which there are none"


def _error(bad: Action, *, expected: str, found: str) -> ScheduleError:
    """Return an error about `bad`."""
    remedy = f"Look at it with print(format_grid(schedule, bad=Action.parse('{bad}')))."
    return ScheduleError(explain(expected=expected, found=found, remedy=remedy))

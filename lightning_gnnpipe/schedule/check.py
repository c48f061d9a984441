"""Check that a schedule runs the whole step, in a valid order and without a deadlock."""

from __future__ import annotations

from collections import defaultdict

from lightning_gnnpipe.errors import ScheduleError
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
    actions = schedule.ranks[rank]
    first = next((place for place, each in enumerate(actions) if each.op.is_backward), len(actions))
    late = next((each for each in actions[first:] if not each.op.is_backward), None)
    if late is not None:
        raise ScheduleError(
            expected="every rank to finish its forward actions before its first backward "
            "action, since the loss needs the outputs of all chunks",
            found=f"{actions[first]} at place {first} of {schedule.row_label(rank)}, before {late}",
            remedy="Use 'fill_drain' for such a loss. If each micro-batch has its own loss, "
            "set loss='each'.",
        )


def _check_stream(schedule: Schedule, stage: int, op: Op) -> None:
    """Check that `stage` runs `op` once on each expected chunk, in order."""
    expected = [Action(stage, op, chunk) for chunk in _expected_chunks(schedule, stage, op)]
    chunks = ", ".join(str(action.chunk) for action in expected)
    which = f"chunks {chunks} in this order" if chunks else "no chunk"
    rule = f"stage {stage} to run {op.value} on {which}"
    rank = schedule.rank_of(stage)
    label = schedule.row_label(rank)
    allowed, places = set(expected), dict[Action, int]()
    for place, action in enumerate(schedule.ranks[rank]):
        if action.op is op and action.stage == stage:
            if action in places or action not in allowed:
                fault = "a second" if action in places else "an unneeded"
                text = f"{fault} {action} at place {place} of {label}"
                raise _error(action, expected=rule, found=text)
            places[action] = place
    for action in expected:
        if action not in places:
            raise _error(action, expected=rule, found=f"no {action}")
    for (action, place), due in zip(places.items(), expected, strict=True):
        if action != due:
            text = f"{action} at place {place} of {label}, instead of {due}"
            raise _error(action, expected=rule, found=text)


def _check_links(schedule: Schedule) -> None:
    ends: defaultdict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for place, action in enumerate(actions):
            if not action.op.is_compute:
                ends[rank, schedule.peer_of(action)].append((place, action))
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
    if not op.is_compute:
        neighbour = Action(stage, op, 0).partner.stage
        if not schedule.has_transfers or not schedule.crosses_ranks(stage, neighbour):
            return ()
    if op.is_backward:
        return schedule.backward_order if schedule.has_backward else ()
    return schedule.order


def _error(bad: Action, *, expected: str, found: str) -> ScheduleError:
    remedy = f"Look at it with print(format_grid(schedule, bad=Action.parse('{bad}')))."
    return ScheduleError(expected=expected, found=found, remedy=remedy)

"""Lower a schedule: compute actions in, the same with sends and receives out.

Both are asynchronous: a send is started right behind the action that made its data, a receive is
*posted* some chunks ahead of the action that waits for it, so that transfers run while the stage
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_gnnpipe.errors import ScheduleError, explain
from lightning_gnnpipe.schedule.action import Action, Op
from lightning_gnnpipe.schedule.build import Schedule


def add_transfers(schedule: Schedule, *, lookahead: int = 2) -> Schedule:
    """Return `schedule` with its sends and receives; with one stage there are none.

    Forward phase of stage 1 of 3, order 0, 1, 2, `lookahead=1`::

        1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_F2 1F1 1SEND_F1 1F2 1SEND_F2

    The receives of the backward phase stay behind all actions of the forward phase.

    Args:
        schedule: A schedule of compute actions.
        lookahead: How many chunks ahead a receive is posted. A stage holds at most
            `lookahead + 1` open receives at a time, which is what it costs in memory.

    Raises:
        ScheduleError: If `lookahead` is negative or the schedule has transfers already.
    """
    if lookahead < 0:
        raise ScheduleError(
            explain(
                expected="'lookahead' to be 0 or more",
                found=str(lookahead),
                remedy="With 0, a receive is posted just before the action that waits for it.",
            )
        )
    if schedule.has_transfers:
        raise ScheduleError(
            explain(
                expected="a schedule of compute actions",
                found="one that has sends or receives",
                remedy="Call 'add_transfers' once, on what 'fill_drain' returns.",
            )
        )
    ranks = []
    for stage in range(schedule.num_stages):
        # Activations come in over the cut before the stage and go out over the one behind it,
        # gradients the other way round. The first and the last stage lack one of the cuts.
        is_first, is_last = stage == 0, stage == schedule.num_stages - 1
        forward, backward = [*schedule.forward(stage)], [*schedule.backward(stage)]
        if not is_first:
            forward = _post_receives(forward, Op.RECV_F, lookahead)
            backward = _append_sends(backward, Op.SEND_B)
        if not is_last:
            forward = _append_sends(forward, Op.SEND_F)
            backward = _post_receives(backward, Op.RECV_B, lookahead)
        ranks.append(tuple(forward + backward))
    return replace(schedule, ranks=tuple(ranks))


def _append_sends(actions: Sequence[Action], send: Op) -> list[Action]:
    """Return `actions` with a send right behind each compute action."""
    lowered = []
    for action in actions:
        lowered.append(action)
        if action.op.is_compute:
            lowered.append(Action(action.stage, send, action.chunk))
    return lowered


def _post_receives(actions: Sequence[Action], receive: Op, lookahead: int) -> list[Action]:
    """Return `actions` with the receive of each compute action hoisted by `lookahead` chunks."""
    waiting = [action for action in actions if action.op.is_compute]
    lowered: list[Action] = []
    num_posted = num_passed = 0
    for action in actions:
        if action.op.is_compute:
            num_passed += 1
            due = waiting[num_posted : num_passed + lookahead]
            lowered += [Action(action.stage, receive, each.chunk) for each in due]
            num_posted += len(due)
        lowered.append(action)
    return lowered

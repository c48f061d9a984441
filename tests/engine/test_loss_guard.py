"""The guard sees jumps of the training loss, and nothing else."""

from __future__ import annotations

import pytest

from lightning_gnnpipe.engine.after_step import LossGuard

FALLING = [2.0 * 0.9**step for step in range(30)]


def jumps(guard: LossGuard, *losses: float) -> list[int]:
    """Return at which of the losses of pipelined steps the guard sees jumps."""
    return [i for i, loss in enumerate(losses) if guard.sees_jump(loss, is_exact=False)]


def test_a_jump_makes_one_step_exact_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    assert jumps(LossGuard(), *FALLING, *[20.0] * 46) == [30]  # it is at 20 then
    (record,) = caplog.records
    assert "jumped to 20 after a pipelined step (at most 2 before)" in record.getMessage()


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([*FALLING, *(10.0**step for step in range(2, 82))], [30, 51, 72, 93]),  # one step in 20
        ([*FALLING, 2.5], []),
        ([*FALLING, 7.9], []),
        ([*FALLING, float("nan")], []),
        ([*FALLING, float("inf")], []),
        ([*FALLING, -50.0], []),
        ([-10.0 - step for step in range(10)] + [10.0, 100.0], [11]),  # by the range below zero
        ([10.0**step for step in range(5)], []),  # the first steps are not judged
    ],
)
def test_jumps_are_far_above_and_rare(losses: list[float], expected: list[int]) -> None:
    assert jumps(LossGuard(), *losses) == expected


def test_exact_steps_are_not_to_blame() -> None:
    guard = LossGuard()
    assert not jumps(guard, *FALLING)
    assert not guard.sees_jump(1.0, is_exact=True)
    assert not jumps(guard, 100.0)


def test_it_goes_on_from_what_a_checkpoint_keeps() -> None:
    guard, other = LossGuard(), LossGuard()
    assert not jumps(guard, *FALLING)
    other.losses, other.num_steps, other.was_exact = guard.losses, guard.num_steps, guard.was_exact
    assert jumps(other, 20.0) == [0]

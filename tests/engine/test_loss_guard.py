"""The guard sees jumps of the training loss, and nothing else."""

from __future__ import annotations

import logging

import pytest

from lightning_gnnpipe.engine.after_step import LossGuard


def falling(guard: LossGuard, num: int = 30) -> None:
    for step in range(num):
        assert not guard.sees_jump(2.0 * 0.9**step, is_exact=False)


def test_a_jump_makes_one_step_exact_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = LossGuard()
    falling(guard)
    with caplog.at_level(logging.WARNING):
        assert guard.sees_jump(20.0, is_exact=False)
        found = [guard.sees_jump(20.0, is_exact=False) for _ in range(45)]
    assert [i for i, is_jump in enumerate(found) if is_jump] == []  # it is at 20 now
    (record,) = caplog.records
    assert "jumped to 20 after a pipelined step (at most 2 before)" in record.getMessage()


def test_jumps_cost_one_step_in_twenty_at_most() -> None:
    guard = LossGuard()
    falling(guard)
    found = [guard.sees_jump(10.0**step, is_exact=False) for step in range(2, 82)]
    assert sum(found) == 4


@pytest.mark.parametrize("loss", [2.5, 7.9, float("nan"), float("inf"), -50.0])
def test_what_is_not_far_above_is_no_jump(loss: float) -> None:
    guard = LossGuard()
    falling(guard)
    assert not guard.sees_jump(loss, is_exact=False)


def test_exact_steps_are_not_to_blame() -> None:
    guard = LossGuard()
    falling(guard)
    assert not guard.sees_jump(1.0, is_exact=True)
    assert not guard.sees_jump(100.0, is_exact=False)


def test_losses_below_zero_jump_by_their_range() -> None:
    guard = LossGuard()
    for step in range(10):
        guard.sees_jump(-10.0 - step, is_exact=False)
    assert not guard.sees_jump(10.0, is_exact=False)
    assert guard.sees_jump(100.0, is_exact=False)


def test_the_first_steps_are_not_judged() -> None:
    guard = LossGuard()
    assert not any(guard.sees_jump(10.0**step, is_exact=False) for step in range(5))


def test_it_goes_on_from_what_a_checkpoint_keeps() -> None:
    guard = LossGuard()
    falling(guard)
    other = LossGuard(guard.losses, guard.num_steps, was_exact=guard.was_exact)
    assert other.sees_jump(20.0, is_exact=False)

"""Masks of dropout that are drawn ahead are those that the segment would draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_gnnpipe.passing import Masks, dropout
from lightning_gnnpipe.passing import masks as masks_module
from lightning_gnnpipe.passing.matrix import RUNNING

PLACE = (3, 1)
Forward = Callable[[Tensor], Tensor]


def usual(x: Tensor, p: float = 0.2) -> Tensor:
    return dropout(dropout(x, 0.5).exp(), p)


def stronger(x: Tensor) -> Tensor:
    return usual(x, 0.7)


def wider(x: Tensor) -> Tensor:
    return usual(torch.cat([x, x]))


def shorter(x: Tensor) -> Tensor:
    return dropout(x, 0.5)


def longer(x: Tensor) -> Tensor:
    return dropout(usual(x), 0.5)


def mixed(x: Tensor) -> Tensor:
    return usual(x + torch.rand(5))


def turned(x: Tensor) -> Tensor:
    """Of a turned tensor masks may be drawn in another order."""
    return usual(x.t())


def in_place(x: Tensor) -> Tensor:
    return dropout(dropout(x, 0.5).sin(), 0.2, inplace=True)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Masks]:
    monkeypatch.setattr(masks_module, "_OF_IDLE", 1e9)  # any wait is long enough
    found = Masks()
    RUNNING.set(SimpleNamespace(masks=found))  # type: ignore[arg-type]
    with torch.random.fork_rng():
        yield found
    RUNNING.set(None)


def run(masks: Masks, forward: Forward, step: int, x: Tensor) -> Tensor:
    """Run a step of one segment, and wait before the next."""
    masks.begin_step([(PLACE, step)], [(PLACE, step + 1)])
    masks.start(PLACE, step)
    found = forward(x)
    masks.stop()
    with masks.waiting("outputs"):
        pass
    return found


def expected(forward: Forward, step: int, x: Tensor) -> Tensor:
    before = RUNNING.get()
    RUNNING.set(None)
    torch.manual_seed(step)
    found = forward(x)
    RUNNING.set(before)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "later", [usual, stronger, wider, shorter, longer, mixed, turned, in_place]
)
def test_numbers_are_those_of_the_seed(later: Forward, dtype: torch.dtype, masks: Masks) -> None:
    """Also where the network changes, and masks that were drawn no longer fit."""
    x = torch.randn(40, 5, dtype=dtype, requires_grad=True)
    for step in range(6):
        forward = usual if step < 3 else later
        found = run(masks, forward, step, x)
        if (forward, step) != (mixed, 3):  # what is drawn beside masks has other numbers, once
            wanted = expected(forward, step, x)
            assert torch.equal(found, wanted)
            weights = torch.randn_like(found)
            ours, theirs = (torch.autograd.grad(one, x, weights) for one in (found, wanted))
            assert torch.equal(*ours, *theirs)


def count_draws(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    drawn, original = list[Any](), functional.dropout

    def note(*args: Any) -> Tensor:
        drawn.append(args)
        return original(*args)

    monkeypatch.setattr(functional, "dropout", note)
    return drawn


@pytest.mark.parametrize(
    ("forward", "is_ahead"), [(usual, True), (mixed, False), (turned, False), (in_place, False)]
)
def test_what_draws_nothing_else_draws_ahead(
    forward: Forward, is_ahead: bool, masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, x = count_draws(monkeypatch), torch.randn(40, 5)
    for step in range(4):
        run(masks, forward, step, x)
    # The first step notes, the first wait is measured: masks are there from the third step on.
    assert len(drawn) == (4 if is_ahead else 8)


def test_at_most_half_a_step_is_drawn_ahead(masks: Masks) -> None:
    x = torch.randn(40, 5)
    places = [(segment, 0) for segment in range(8)]
    for step in range(3):
        now, later = ([(one, 100 * s + one[0]) for one in places] for s in (step, step + 1))
        masks.begin_step(now, later)
        for place, seed in now:
            masks.start(place, seed)
            usual(x)
            masks.stop()
        with masks.waiting("outputs"):
            pass
    assert len(masks._ahead) == 5


def test_masks_of_another_step_are_dropped(masks: Masks) -> None:
    x = torch.randn(40, 5)
    for step in range(3):
        run(masks, usual, step, x)
    assert masks._ahead
    masks.begin_step([(PLACE, 50)], [(PLACE, 51)])
    assert not masks._ahead


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True), (1.0, True)])
def test_what_draws_no_mask_is_torchs_own(p: float, training: bool, masks: Masks) -> None:
    x = torch.randn(4, 5)
    masks.start(PLACE, 1)
    assert torch.equal(dropout(x, p, training), functional.dropout(x, p, training))
    assert not masks._noted
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(x, 1.5)

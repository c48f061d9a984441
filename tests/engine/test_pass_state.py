"""Whether a training pass has left what later ones may read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_gnnpipe.steps.training import PassState

FINE, BAD = [torch.zeros(2), torch.ones(1)], [torch.zeros(2), torch.tensor([torch.inf])]


def begun() -> PassState:
    state = PassState()
    state.begin()
    return state


def forward_done(outputs: list[torch.Tensor] = FINE) -> PassState:
    state = begun()
    state.end_forward(outputs)
    return state


def going_back(grads: list[torch.Tensor] = FINE) -> PassState:
    state = forward_done()
    state.begin_backward(grads)
    return state


def done(grads: list[torch.Tensor] = FINE) -> PassState:
    state = going_back(grads)
    state.end_backward(FINE)
    return state


def found(grads: list[torch.Tensor]) -> PassState:
    state = going_back()
    state.end_backward(grads)
    return state


def settled(state: PassState) -> PassState:
    state.settle()
    return state


def abandoned(state: PassState) -> PassState:
    state.abandon()
    return state


@pytest.mark.parametrize(
    ("make", "is_lost", "awaits"),
    [
        (PassState, False, False),
        (begun, True, False),
        (forward_done, False, True),
        (lambda: forward_done(BAD), False, True),  # its gradients may yet be finite
        (going_back, True, False),
        (done, False, False),
        (lambda: done(BAD), True, False),
        (lambda: done([]), False, False),
        (lambda: found(BAD), True, False),
        (lambda: found([]), False, False),
        (lambda: found([torch.sparse_coo_tensor([[0]], [torch.nan], (3,))]), True, False),
        (lambda: found([torch.sparse_coo_tensor([[0]], [1.0], (3,))]), False, False),
        (lambda: abandoned(PassState()), False, False),
        (lambda: abandoned(begun()), True, False),
        (lambda: abandoned(forward_done()), False, False),
        (lambda: abandoned(forward_done(BAD)), True, False),
        (lambda: abandoned(going_back()), True, False),
        (lambda: abandoned(done()), False, False),
        (lambda: abandoned(done(BAD)), True, False),
        (lambda: settled(done(BAD)), False, False),
        (lambda: settled(begun()), False, False),
        (lambda: settled(abandoned(going_back())), False, False),
    ],
)
def test_what_is_lost(make: Callable[[], PassState], is_lost: bool, awaits: bool) -> None:
    state = make()
    assert (state.is_lost, state.awaits_backward) == (is_lost, awaits)


def test_another_pass_begins_anew() -> None:
    state = abandoned(going_back(BAD))
    state.begin()
    state.end_forward(FINE)
    state.begin_backward(FINE)
    state.end_backward(FINE)
    assert not state.is_lost

"""Putting a module into another state for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def switched(module: nn.Module, training: bool, but: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put `module` into training or evaluation mode for the block, then as each part of it was.

    The layers in `but` stay as they are.
    """
    flags = [(m, m.training) for m in module.modules()]
    kept = [(m, m.training) for m in but]
    module.train(training)
    for m, flag in kept:
        m.training = flag
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """Have `module` run its own forward within the block."""
    attached = module.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if attached is not None:
            module.__dict__["forward"] = attached

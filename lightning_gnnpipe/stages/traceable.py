"""Patches that let torch.fx trace factories, aggregations and DeepGCNLayer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import fx, nn
from torch_geometric.nn import Aggregation, DeepGCNLayer

_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Patch torch, PyG and `module` for a trace within the block."""
    with _traceable_factories(), _traceable_aggregations(), _without_checkpoints(module):
        yield


@contextmanager
def _without_checkpoints(module: nn.Module) -> Iterator[None]:
    """Turn activation checkpoints of DeepGCNLayer off: they read `requires_grad` of inputs."""
    before = [(m, m.ckpt_grad) for m in module.modules() if isinstance(m, DeepGCNLayer)]
    for layer, _ in before:
        layer.ckpt_grad = False
    try:
        yield
    finally:
        for layer, value in before:
            layer.ckpt_grad = value


@contextmanager
def _traceable_aggregations() -> Iterator[None]:
    """Call aggregations as plain modules: `Aggregation.__call__` inspects values."""
    kind, thread = Aggregation, get_ident()
    original = kind.__call__

    def call(self: Aggregation, *args: Any, **kwargs: Any) -> Any:
        is_traced = get_ident() == thread
        return (nn.Module.__call__ if is_traced else original)(self, *args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


@contextmanager
def _traceable_factories() -> Iterator[None]:
    """Let `torch.zeros(x.size(0), ...)` and similar functions accept traced sizes."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}
    try:
        for name, original in originals.items():
            setattr(torch, name, _traceable(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _traceable(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []

        def keep(value: Any) -> Any:
            if isinstance(value, fx.Proxy):
                found.append(value)
            return value

        fx.node.map_aggregate((args, kwargs), keep)
        if not found:
            return original(*args, **kwargs)
        return found[0].tracer.create_proxy("call_function", original, args, kwargs)

    return create

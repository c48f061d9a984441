"""Layers that pass messages against the edges of the batch, on one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing import MessageContext


def replace_attributes(conv: nn.Module, attributes: Mapping[str, Any]) -> Callable[[], None]:
    """Set attributes of the instance; return a function that restores the old ones."""
    missing = object()
    before = {key: conv.__dict__.get(key, missing) for key in attributes}
    conv.__dict__.update(attributes)

    def restore() -> None:
        for key, value in before.items():
            if value is missing:
                conv.__dict__.pop(key, None)
            else:
                conv.__dict__[key] = value

    return restore


def direct(name: str, conv: MessagePassing, context: MessageContext) -> Callable[..., Any]:
    """Return the layer's forward, with the chunk's edges in the direction that it reads them.

    A layer on flipped edges (DirGNNConv), or with flow "target_to_source", needs the edges that
    start in the chunk. With this flow it runs as a "source_to_target" layer on flipped edges.
    """
    original = conv.forward
    is_upstream = conv.flow == "target_to_source"

    def run(*args: Any, **kwargs: Any) -> Any:
        with context.in_layer():
            return run_inside(args, kwargs)

    def run_inside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = (*args, *kwargs.values())
        given, number, is_flip = _find_edges(values, name, context)
        if given is None and is_upstream and not context.sees_all:
            raise _refuse_direction(name, "edges that the model changed, or several edge sets")
        # On the whole graph without histories, PyG handles reversed edges itself.
        is_turned = not context.is_plain and (is_flip or is_upstream)
        if given is None:
            return original(*args, **kwargs)
        if not is_turned:
            with context.along(given):
                return original(*args, **kwargs)
        is_reverse = is_flip != is_upstream
        with context.directed(number, is_reverse) as edges, _downstream(conv):

            def turn(key: str, value: Any) -> Any:
                if value is given:
                    return edges
                return _turn(name, key, value, context) if is_reverse else value

            return original(
                *(turn("", value) for value in args),
                **{key: turn(key, value) for key, value in kwargs.items()},
            )

    return run


@contextmanager
def _downstream(conv: MessagePassing) -> Iterator[None]:
    """Set the flow to "source_to_target" within the block."""
    restore = replace_attributes(conv, {"flow": "source_to_target"})
    try:
        yield
    finally:
        restore()


def _find_edges(
    values: Sequence[Any], name: str, context: MessageContext
) -> tuple[Tensor | None, int, bool]:
    """Return the argument with the chunk's edges, their set, and whether its rows are swapped.

    The argument is None if there are no edges, or several sets: `propagate` then finds the set.
    """
    found = [(value, i) for value in values if (i := context.find_edges(value)) is not None]
    if found:
        is_one = len({number for _, number in found}) == 1
        return (*found[0], False) if is_one else (None, 0, False)
    if not context.is_plain:
        for value in values:
            is_edges = isinstance(value, Tensor) and value.dim() == 2 and value.size(0) == 2
            if is_edges and value.dtype == torch.int64:
                number = context.find_flip(name, value)
                if number is not None:
                    return value, number, True
    return None, 0, False


def _turn(name: str, key: str, value: Any, context: MessageContext) -> Any:
    """Return `value` for the reversed edges, if it is an edge-level leaf of the batch."""
    if not isinstance(value, Tensor):
        return value
    part = context.reversed_leaf(value)
    if part is not None:
        return part
    if key.startswith("edge") and not context.sees_all:
        raise _refuse_direction(name, f"'{key}' that the model computes, or that needs a gradient")
    return value


def _refuse_direction(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            expected=f"layer '{name}', in which messages flow against the edges, to read edges and "
            "edge features of the batch as they are",
            found=found,
            remedy="Pass the reversed edges' features in, or train with num_chunks=1.",
        )
    )

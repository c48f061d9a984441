"""Switch off the state that layers keep besides their outputs: caches and SuperGATConv's loss.

A cache would hold the edges of the first chunk or sample. SuperGATConv samples node pairs for a
loss that the user asks for after the forward pass, but a chunk has neither all pairs nor the user's
backward. Its outputs do not depend on the pairs, so none are sampled and the loss raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe._compat_pyg import CACHES
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.layers.direction import replace_attributes


@contextmanager
def without_memory(convs: Mapping[str, MessagePassing]) -> Iterator[None]:
    """Switch off the layers' caches and losses within the block."""
    with ExitStack() as stack:
        for name, conv in convs.items():
            if getattr(conv, "cached", False):
                empty = {cache: None for cache in CACHES if hasattr(conv, cache)}
                stack.callback(replace_attributes(conv, {"cached": False, **empty}))
            if isinstance(conv, gnn.SuperGATConv):
                attributes = {
                    "forward": _without_pairs(conv.forward),
                    "positive_sampling": _no_edges,
                    "att_x": None,
                    "att_y": None,
                    "get_attention_loss": _refuse_loss(name, conv),
                }
                stack.callback(replace_attributes(conv, attributes))
        yield


def guard_losses(convs: Mapping[str, MessagePassing]) -> Callable[[], None]:
    """Make the layers raise if their loss is asked for; return a function that undoes this."""
    stack = ExitStack()
    for name, conv in convs.items():
        if isinstance(conv, gnn.SuperGATConv):
            attributes = {"get_attention_loss": _refuse_loss(name, conv)}
            stack.callback(replace_attributes(conv, attributes))
    return stack.close


def _without_pairs(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return SuperGATConv's forward without node pairs for its loss."""

    def forward(x: Tensor, edge_index: Tensor, *_: Any, **__: Any) -> Tensor:
        return original(x, edge_index, _no_edges(edge_index))

    return forward


def _no_edges(edge_index: Tensor) -> Tensor:
    return edge_index[:, :0]


def _refuse_loss(name: str, conv: gnn.SuperGATConv) -> Callable[[], Tensor]:
    def get_attention_loss() -> Tensor:
        if not conv.training:  # PyG returns 0
            return type(conv).get_attention_loss(conv)
        raise UnsupportedError(
            explain(
                expected="the loss of a pipelined module to be computed from its outputs",
                found=f"get_attention_loss() of layer '{name}', a {type(conv).__name__}, which "
                "looks at random pairs of all nodes",
                remedy="Leave that term out of the loss (the layer's outputs are exact), or train "
                "without GNNPipeStrategy.",
            )
        )

    return get_attention_loss

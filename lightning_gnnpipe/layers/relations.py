"""Operations of HANConv, HGTConv and mesh convolutions besides passing messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv import han_conv

from lightning_gnnpipe._compat_pyg import SOURCE_ROWS
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import InLayer, MessageContext, Replacement

Rows = dict[str, Tensor]


RELATIONAL = (gnn.HANConv, gnn.HGTConv)


def related(convs: Mapping[str, MessagePassing], context: MessageContext) -> Iterator[Replacement]:
    """Yield replacements with which HANConv and HGTConv read other chunks."""
    names = {id(c.k_lin): name for name, c in convs.items() if isinstance(c, gnn.HANConv)}
    if names:
        yield han_conv, {"group": InLayer(context, _group(names, context), han_conv.group)}
    for name, conv in convs.items():
        if isinstance(conv, gnn.HGTConv):
            yield conv, {SOURCE_ROWS: _build_sources(name, conv, context)}


def _group(names: Mapping[int, str], context: MessageContext) -> Callable[..., Any]:
    """Return HANConv's `group`; `names` maps the id of a layer's `k_lin` to its name."""
    original = han_conv.group

    def group(
        xs: Sequence[Tensor], q: Tensor, k_lin: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not xs or context.store is None:
            return original(xs, q, k_lin)
        sets = torch.stack(list(xs))  # [num_edge_sets, num_nodes, channels]
        mean = _mean_over_nodes(names[id(k_lin)], torch.tanh(k_lin(sets)).transpose(0, 1), context)
        weight = F.softmax((q * mean).sum(-1), dim=0)
        return (weight.view(-1, 1, 1) * sets).sum(0), weight

    return group


def _mean_over_nodes(layer: str, rows: Tensor, context: MessageContext) -> Tensor:
    """Return the mean over all chunks; `rows` of this chunk: `[num_nodes_of_chunk, *]`."""
    store, at = context.store, context.at
    assert store is not None
    is_whole, between = context.is_whole, at.plan.between_chunks
    chunks = at.plan.chunks if is_whole else (at.chunk,)
    node = between.whole.chunks[0] if is_whole else between.chunks[at.chunk.index]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    parts = torch.split(rows, [chunk.num_nodes for chunk in chunks])
    shares = torch.stack([part.sum(0, dtype=dtype) for part in parts]) / at.whole.num_nodes
    key = context.next_key(layer)
    wide = context.exchange(shares, store.by_chunk, key, node, is_linear=True)
    return wide.sum(0).to(rows.dtype)


def _build_sources(
    name: str, conv: gnn.HGTConv, context: MessageContext
) -> Callable[[Rows, Rows, dict[Any, Tensor]], Any]:
    """Return HGTConv's method that copies keys and values, widened by halo rows."""
    original = getattr(conv, SOURCE_ROWS)

    def build(keys: Rows, values: Rows, edge_sets: dict[Any, Tensor]) -> Any:
        call = context.next_call(name)

        def widen(argument: str, rows: Rows) -> Rows:
            return {key: context.widen(name, call, argument, own) for key, own in rows.items()}

        return original(widen("k", keys), widen("v", values), edge_sets)

    return build


def check_order(
    name: str, conv: MessagePassing, edge_index: Tensor, context: MessageContext
) -> None:
    """Raise unless MeshCNNConv `name` gets the batch's edges, in groups with one target each.

    It reads edges 4 i, ..., 4 i + 3 as the neighbours a, b, c and d. Plans sort edges by target and
    keep the order of edges with one target. Any other group would be split, even on one chunk.
    """
    is_own = edge_index is context.at.chunk.edge_index and not context.at.is_reverse
    if is_own and context.at.has_groups_of_four:
        return
    raise UnsupportedError(
        expected=f"the edges of layer '{name}', a {type(conv).__name__}, in groups of 4 "
        "with the same target",
        found="groups with several targets" if is_own else "edges that the model changed",
        remedy="Sort 'edge_index' so that each node i, in row 1, has four consecutive columns "
        "(a, i), (b, i), (c, i) and (d, i). Pass it to the layer unchanged.",
    )

"""Interception of `MessagePassing.propagate` and `edge_updater` on the instances of a model.

The wrapped methods are in the instance's `__dict__` during a pass only: the module is the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from lightning_gnnpipe._compat_pyg import (
    CACHES,
    UNDECOMPOSED,
    arguments_of,
    arguments_of_update,
)
from lightning_gnnpipe._compat_torch import BATCH_NORM, NO_CHECKPOINT
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers.native import NativeContext, deferred
from lightning_gnnpipe.layers.normalize import localized
from lightning_gnnpipe.layers.statistics import has_statistics, whole_statistics
from lightning_gnnpipe.passing import (
    ROWS,
    ChunkMatrix,
    MessageContext,
    Replacement,
    dropout,
    linear_rule,
    replace_all,
    replace_attributes,
)

_NOTHING: AbstractContextManager[Any] = nullcontext()


def find_convs(module: nn.Module) -> dict[str, MessagePassing]:
    """Return the message-passing layers of `module` by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, MessagePassing)}


@dataclass(frozen=True)
class Intercepted:
    """The layers of a model that see more than one row."""

    convs: dict[str, MessagePassing]
    norms: dict[str, nn.Module]  # with statistics over all nodes
    batch_norms: dict[str, nn.Module]  # with BatchNorm's statistics; some are in `norms` too
    # PyG's blocks that would recompute layers outside of a pass, and attributes to prevent it.
    blocks: list[tuple[nn.Module, dict[str, bool]]]
    dropouts: list[nn.Dropout]

    @property
    def all(self) -> list[nn.Module]:
        named = self.convs | self.norms | self.batch_norms
        return [*named.values(), *(block for block, _ in self.blocks)]

    def within(self, called: Iterable[nn.Module]) -> Intercepted:
        """Return the layers that are parts of `called`: a head sees all rows."""
        inner = {id(part) for one in called for part in one.modules()}
        convs, norms, batch_norms = (
            {name: m for name, m in named.items() if id(m) in inner}
            for named in (self.convs, self.norms, self.batch_norms)
        )
        blocks = [block for block in self.blocks if id(block[0]) in inner]
        dropouts = [one for one in self.dropouts if id(one) in inner]
        return Intercepted(
            cast(dict[str, MessagePassing], convs), norms, batch_norms, blocks, dropouts
        )


def find_layers(module: nn.Module) -> Intercepted:
    """Return the layers of `module` to intercept."""
    blocks: list[tuple[nn.Module, dict[str, bool]]] = []
    for m in module.modules():
        if isinstance(m, InvertibleModule):
            blocks.append((m, {"disable": True}))
        elif isinstance(m, gnn.DeepGCNLayer):
            blocks.append((m, {"ckpt_grad": False}))
    named = dict(module.named_modules())
    norms = {name: m for name, m in named.items() if has_statistics(m)}
    batch_norms = {name: m for name, m in named.items() if isinstance(m, BATCH_NORM)}
    dropouts = [m for m in module.modules() if type(m) is nn.Dropout]
    return Intercepted(find_convs(module), norms, batch_norms, blocks, dropouts)


def intercept(layers: Intercepted, context: MessageContext | NativeContext) -> ExitStack:
    """Run `layers` on the running chunk of `context` within the block."""
    return replace_all(_replacements(layers, context))


def _replacements(
    layers: Intercepted, context: MessageContext | NativeContext
) -> Iterator[Replacement]:
    yield NO_CHECKPOINT  # backward would run layers of its function outside of the pass
    yield from layers.blocks
    yield from _memoryless(layers.convs)
    if isinstance(context, NativeContext):
        yield from deferred(layers.batch_norms, context)
        return
    if layers.norms:
        yield from whole_statistics(layers.norms, context)
    yield from localized(layers.convs, context)
    for one in layers.dropouts if context.masks is not None else ():
        yield one, {"forward": partial(_drop, one)}
    for conv in layers.convs.values():
        for one in conv.modules():
            if isinstance(one, gnn.QuantileAggregation):
                yield one, {"forward": _with_first_node(one)}
    for name, conv in layers.convs.items():
        if isinstance(conv, gnn.HGTConv):  # joins types of nodes: only the whole graph may reach it
            continue
        replaced: dict[str, Any] = {"forward": _direct(name, conv, context)}
        read = {method: arguments_of(method, conv) for method in ("propagate", "edge_updater")}
        for method in read:
            replaced[method] = _wrap(name, conv, method, read, context)
        yield conv, replaced


def _drop(layer: nn.Dropout, input: Tensor) -> Tensor:
    return dropout(input, layer.p, layer.training, layer.inplace)


def _with_first_node(quantile: gnn.QuantileAggregation) -> Callable[..., Tensor]:
    """Return its forward for a chunk whose first node may have no messages, where PyG's fails."""
    original = quantile.forward

    def forward(x: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not bool((index == 0).any()):
            one = x.new_full((1, *x.shape[1:]), quantile.fill_value)
            x, index = torch.cat([one, x]), torch.cat([index.new_zeros(1), index])
        return original(x, index, *args, **kwargs)

    return forward


def _direct(name: str, conv: MessagePassing, context: MessageContext) -> Callable[..., Any]:
    """Return the layer's forward, with the chunk's edges in the direction that it reads them.

    A layer on turned edges (DirGNNConv), or with flow "target_to_source", needs the edges that
    start in the chunk. With this flow it runs as a "source_to_target" layer on turned edges.
    """
    original, is_upstream = conv.forward, conv.flow == "target_to_source"

    @context.in_layer
    def run(*args: Any, **kwargs: Any) -> Any:
        if not (is_upstream or context.chooses_edges):
            return original(*args, **kwargs)

        def call(given: Any, edges: Any) -> Any:
            """Call the layer with `edges` instead of `given`."""
            named = {key: edges if value is given else value for key, value in kwargs.items()}
            return original(*(edges if value is given else value for value in args), **named)

        values = (*args, *kwargs.values())
        matrix = next((one for one in values if isinstance(one, ChunkMatrix)), None)
        if matrix is not None:
            with matrix.along() as entries:
                # ClusterGCNConv asks for a square matrix; it only counts the entries of a row.
                is_square = isinstance(conv, gnn.ClusterGCNConv) and entries.layout is not None
                return call(matrix, entries.edges if is_square else context.as_matrix(entries))
        found = {id(at): (one, at) for one in values if (at := context.find(one)) is not None}
        if len(found) != 1:  # none, or several sets: `propagate` finds them
            if is_upstream and not context.sees_all:
                raise UnsupportedError(
                    f"Layer '{name}' with flow='target_to_source' has no edge_index that is an "
                    "argument of forward, or several.\nA chunk has the edges that end in its "
                    "nodes.\nPass edge_index.flip(0) as an argument, to a layer without flow=."
                )
            return original(*args, **kwargs)
        ((given, at),) = found.values()
        # On the whole graph without histories, PyG handles turned edges itself.
        if context.is_plain or not (at.is_reverse or is_upstream):
            with context.along(given):
                return original(*args, **kwargs)
        if hasattr(conv, "__norm__"):  # PyG's Laplacian has the degrees of sources in both flows
            raise UnsupportedError(
                f"Layer '{name}' has a Laplacian and flow='target_to_source'.\nIn chunks it would "
                "take the degrees of the turned edges.\nPass edge_index.flip(0) as an argument, to "
                "a layer without flow=."
            )
        downstream = replace_attributes(conv, {"flow": "source_to_target"})
        with context.directed(at.edge_set, at.is_reverse != is_upstream) as edges, downstream:
            return call(given, edges)

    return run


def _wrap(
    name: str,
    conv: MessagePassing,
    method: str,
    read: Mapping[str, Iterable[str]],
    context: MessageContext,
) -> Callable[..., Tensor]:
    """Return the method on the rows of one chunk; source-side arguments also hold halo rows.

    `read`: the names, like "x_j", that each method reads.
    """
    original = getattr(conv, method)
    is_propagate = method == "propagate"
    rule = linear_rule(conv) if is_propagate else None
    sources = frozenset(one[:-2] for one in read[method] if one.endswith("_j"))
    by_target = frozenset(one[:-2] for names in read.values() for one in names if one[-2:] == "_i")
    kept = sources & frozenset(arguments_of_update(conv)) if is_propagate else frozenset()

    def run(edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        if is_propagate and conv.decomposed_layers > 1:
            return _in_pieces(conv, edge_index, size, sources, kwargs)
        is_upstream = conv.flow != "source_to_target"
        if is_upstream and (context.at.is_reverse or not context.sees_all):  # unlike in `_direct`
            raise UnsupportedError(
                f"Layer '{name}' sets self.flow in its forward.\nA chunk has the edges that end in "
                "its nodes.\nBuild two layers in __init__, one of them with flow="
                "'target_to_source', and leave self.flow as it is."
            )
        call, odd = next(context.calls[name]), None
        if size is not None and context.sees_all:  # such as nodes and hyperedges
            sizes = tuple([one if one is None else int(one) for one in size])
            odd = None if {*sizes} <= {None, context.at.chunk.num_nodes} else sizes
        if rule is not None and not is_upstream and odd is None:
            rows = kwargs.get(ROWS)
            rows = rows[0] if isinstance(rows, tuple | list) else rows
            weight = None if rule.weight is None else kwargs.get(rule.weight)
            summed = context.weighted_sum(name, call, rule, edge_index, rows, weight)
            if summed is not None:
                return summed
        along, replaced, wide = _NOTHING, _NOTHING, dict(kwargs)
        if context.chooses_edges:
            entries = context.entries_of(edge_index)
            along = context.along(edge_index if entries is None else entries.edges)
        if own := {key: kwargs[key] for key in kept & kwargs.keys()} if kept else {}:
            update = conv.update  # which reads rows of the chunk's nodes alone
            narrow = {"update": lambda out, **given: update(out, **{**given, **own})}
            replaced = replace_attributes(conv, narrow)
        with along, replaced:
            chunk = context.at.chunk
            for argument in sources & kwargs.keys() if odd is None else ():
                value = kwargs[argument]  # a tensor, or a (source, target) pair
                is_pair = isinstance(value, tuple | list)
                source, target = value if is_pair else (value, value)
                if isinstance(source, Tensor):
                    place = name, call, argument
                    rows = context.widen(*place, source, conv.node_dim, is_linear=rule is not None)
                    is_pair = is_pair or argument in by_target
                    wide[argument] = (rows, target) if is_pair else rows
            context.is_passing = True
            try:
                own_size = (chunk.num_nodes + chunk.num_halo, chunk.num_nodes)
                return original(edge_index, size=odd or own_size, **wide)
            finally:
                context.is_passing = False

    return run


def _in_pieces(
    conv: MessagePassing,
    edge_index: Tensor,
    size: Any,
    sources: frozenset[str],
    kwargs: dict[str, Any],
) -> Tensor:
    """Call `propagate` for one slice of the channels at a time; see PyG's `decomposed_layers`."""
    given = sources & kwargs.keys()
    pieces = zip(*(kwargs[key].chunk(conv.decomposed_layers, -1) for key in given), strict=True)
    parts = [kwargs | dict(zip(given, piece, strict=True)) for piece in pieces]
    with replace_attributes(conv, UNDECOMPOSED):
        return torch.cat([conv.propagate(edge_index, size=size, **part) for part in parts], dim=-1)


def without_memory(convs: Mapping[str, MessagePassing]) -> ExitStack:
    """Switch off the layers' caches within the block."""
    return replace_all(_memoryless(convs))


def _memoryless(convs: Mapping[str, MessagePassing]) -> Iterator[Replacement]:
    """Yield replacements that switch off caches, which would hold the edges of the first chunk."""
    for conv in convs.values():
        if getattr(conv, "cached", False):
            yield conv, {"cached": False, **{one: None for one in CACHES if hasattr(conv, one)}}

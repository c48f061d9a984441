"""Autograd functions that exchange embeddings and gradients between chunks.

Source: GNNPipe (arXiv 2308.10087), as the exact gradient of what was computed: a stale row is a
constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.nn import MessagePassing, aggr

from lightning_gnnpipe._compat_pyg import has_own_propagate, multiplies_matrix, passing_hooks
from lightning_gnnpipe._compat_torch import has_hooks
from lightning_gnnpipe.graph import Chunk
from lightning_gnnpipe.passing.sparse import Adjacency, multiply
from lightning_gnnpipe.staleness import HistoryStore, StepOrder


class CallKey(NamedTuple):
    """Key of one history: the `call`-th time that `layer` in `segment` widens `argument`."""

    segment: int
    layer: str
    call: int
    argument: str


class Exchange(torch.autograd.Function):
    """Read rows of other chunks as a layer is bound to do, see `BoundHalo` and `BoundSum`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bound: BoundHalo | BoundSum, is_replay: bool | None
    ) -> Tensor:
        ctx.bound = bound
        return bound.forward(rows, is_replay)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.bound.backward(grad), None, None


@dataclass(slots=True, eq=False)
class BoundHalo:
    """An argument of a layer bound to one chunk, whose rows it appends halo rows to.

    Backward runs over the chunks in reverse order. It adds the halo rows' gradients to a buffer,
    and takes what later chunks added for this chunk's rows. Gradients of stale rows arrive after
    the backward of their chunk, so they are dropped.

    Attributes:
        is_linear: Whether the layer sums rows with weights.
        factors: `[num_halo]`, see `StepOrder.halo_by_drift`; each step writes them in place.
    """

    key: CallKey
    chunk: Chunk
    store: HistoryStore
    is_linear: bool
    factors: Tensor | None = None

    def forward(self, rows: Tensor, is_replay: bool | None) -> Tensor:
        """Push the rows, `[num_nodes, *]`; return them with the halo rows, `[num_wide, *]`."""
        store, key, chunk = self.store, self.key, self.chunk
        if not is_replay:
            store.push(key, chunk, rows, keeps_old=is_replay is not None)
        if chunk.num_halo == 0:
            return rows.view_as(rows)
        wide = rows.new_empty((chunk.num_nodes + chunk.num_halo, *rows.shape[1:]))
        wide[: chunk.num_nodes] = rows
        halo = wide[chunk.num_nodes :]
        if is_replay:
            drift = store.read_again(key, chunk, halo)
        else:
            table, drift = store.read(key, chunk)
            if (table.dtype, table.device) == (halo.dtype, halo.device):
                torch.index_select(table, 0, chunk.halo, out=halo)  # without a temporary
            else:
                store.fetch(table, chunk, halo)
        if drift is not None:
            flat = halo.view(halo.size(0), -1)
            if self.factors is None or self.factors.dtype != flat.dtype:
                self.factors = store.order.halo_by_drift(chunk, flat)
            flat.addr_(self.factors, drift.to(flat))
        return wide

    def backward(self, grad: Tensor) -> Tensor:
        store, key, chunk = self.store, self.key, self.chunk
        if chunk.num_halo:
            store.push_grad(key, chunk, grad[chunk.num_nodes :])
        return store.add_grad(key, chunk, grad[: chunk.num_nodes], is_linear=self.is_linear)


ROWS = "x"

# Methods that return `x_j` or `weight * x_j`, and the argument that holds the weight. A subclass
# that overrides `message` is not listed.
_LINEAR: dict[Callable[..., Any], str | None] = {
    MessagePassing.message: None,
    gnn.APPNP.message: "edge_weight",
    gnn.ChebConv.message: "norm",
    gnn.GCN2Conv.message: "edge_weight",
    gnn.GCNConv.message: "edge_weight",
    gnn.GINConv.message: None,
    gnn.GatedGraphConv.message: "edge_weight",
    gnn.GraphConv.message: "edge_weight",
    gnn.LGConv.message: "edge_weight",
    gnn.MixHopConv.message: "edge_weight",
    gnn.SAGEConv.message: None,
    gnn.SGConv.message: "edge_weight",
    gnn.SSGConv.message: "edge_weight",
    gnn.SignedConv.message: None,
    gnn.SimpleConv.message: "edge_weight",
    gnn.TAGConv.message: "edge_weight",
}
_AGGREGATIONS: dict[type, bool] = {aggr.SumAggregation: False, aggr.MeanAggregation: True}


class LinearRule(NamedTuple):
    """How a layer aggregates.

    `weight`: the argument of `propagate` with one factor per edge. `multiplies`: whether a matrix
    as edges is multiplied as PyG wrote it, not as the user did; None if it is taken apart.
    """

    weight: str | None
    is_mean: bool
    multiplies: bool | None


def linear_rule(conv: MessagePassing) -> LinearRule | None:
    """Return how `conv` aggregates; None unless by a weighted sum or mean of source rows."""
    kind = type(conv)
    is_mean = _AGGREGATIONS.get(type(conv.aggr_module))
    is_plain = (
        kind.message in _LINEAR
        and kind.aggregate is MessagePassing.aggregate
        and kind.update is MessagePassing.update
        and not {"message", "aggregate", "update"} & conv.__dict__.keys()
        and not conv.explain
        and conv.node_dim in (-2, 0)
        and not has_own_propagate(kind)
        and not has_hooks(conv.aggr_module)
        and not any(passing_hooks(conv))
    )
    if not is_plain or is_mean is None:
        return None
    multiplies = multiplies_matrix(conv) if conv.fuse else None
    return LinearRule(_LINEAR[kind.message], is_mean, multiplies)


@dataclass(frozen=True, slots=True, eq=False)
class BoundSum:
    """A weighted sum of a layer bound to one chunk: what stays the same in all steps.

    For layers whose messages are source rows, or rows times a constant weight. Forward pushes the
    chunk's rows and multiplies the adjacency matrix with the history. It copies no halo rows and
    stores no messages. Backward multiplies the transposed matrix with a buffer of output gradients.
    Chunks whose backward has not run are zero there.

    Attributes:
        edges: What the layer passes messages along: a tensor, `[2, num_edges]`, or a matrix.
        weight: What it multiplies messages by, `[num_edges]`.
        dtype: Of the values of the matrix; None for ones.
    """

    rule: LinearRule
    edges: Any
    weight: Tensor | None
    dtype: torch.dtype | None
    adjacency: Adjacency
    chunk: Chunk
    store: HistoryStore | None  # None for whole-graph inference, or without cross-chunk edges
    shards: Any  # see `HistoryStore.shards`
    key: CallKey

    def forward(self, rows: Tensor, is_replay: bool | None) -> Tensor:
        """Return the sums, `[num_nodes, channels]`; the store keeps them if layers run again."""
        store, key, chunk = self.store, self.key, self.chunk
        if store is None:
            return multiply(self.adjacency.block(chunk, rows.dtype, by_source=False), rows)
        if not is_replay:
            store.push(key, chunk, rows)
        if chunk.is_whole:
            table = rows if self.shards is None else store.read(key, chunk)[0].to(rows.dtype)
            return multiply(self.adjacency.rows(chunk, table.dtype), table)
        if is_replay:
            return store.grads(key).kept_output(chunk).to(rows.dtype)
        table, drift = store.read(key, chunk)
        output = multiply(self.adjacency.rows(chunk, table.dtype), table).to(rows.dtype)
        if drift is not None and chunk.num_halo:
            factors = self.adjacency.drift_sums(chunk, store.order, output)
            output.addr_(factors, drift.to(output))
        if is_replay is not None:
            store.grads(key).keep_output(chunk, output)
        return output

    def backward(self, grad: Tensor) -> Tensor:
        if self.store is None:
            return multiply(self.adjacency.block(self.chunk, grad.dtype, by_source=True), grad)
        if self.chunk.is_whole:
            return self._give_back(grad)
        buffer, table = self.store.add_output(self.key, self.chunk, grad)
        done = None if buffer.kept is None else self.store.order
        return self._give_back(table, self.store.linear_scale, done).to(grad.dtype)

    def _give_back(
        self, table: Tensor, scale: float = 1.0, done: StepOrder | None = None
    ) -> Tensor:
        """Return the gradients of the chunk's rows, summed with what other shards send for them."""
        own = multiply(self.adjacency.columns(self.chunk, table.dtype, scale, done), table)
        if self.shards is None:
            return own
        ghosts = self.shards.ghosts(self.chunk)
        columns = self.adjacency.ghost_columns(self.chunk, ghosts, table.dtype, scale, done)
        return own + self.shards.give_back(self.key, self.chunk, multiply(columns, table))

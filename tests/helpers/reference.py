"""The oracle: chunked training with stale rows, on the whole graph, by plain autograd.

It shares no code and no idea of execution with the package. There are no halos, no local node
numbers, no buffers of gradients and no stages. Instead, for every chunk the *whole* model runs on
the *whole* graph, and only the source rows of each message-passing call are exchanged for

    row n of the call =  its row in this very pass            if n is in the chunk
                         its row in the pass of n's chunk     if that chunk came earlier: fresh
                         a constant from an earlier step      otherwise: stale

Rows of the result that belong to other chunks are thrown away. One ``loss.backward()`` over the
rows that were kept, put together in node order, is then the gradient of the function that was
computed, with stale rows as constants.

The rows are those given to ``propagate`` or ``edge_updater``: for GCNConv the transformed ones, for
SAGEConv the raw ones.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops

Key = tuple[str, str, int, str]
"""(name of the conv, method, number of that call in one forward pass, argument)."""

METHODS = {"propagate": ("message", "update"), "edge_updater": ("edge_update",)}
"""The two methods through which nodes see each other, and where their arguments are read."""


class StaleOracle:
    """Compute what chunked training has to compute, and remember each call's source rows.

    Args:
        net: Any stack of PyG convs over an edge index, otherwise row by row.
        partition: Chunk of each node, ``[num_nodes]``.
        cross_chunk_grad_scale: Factor on gradients that flow into fresh rows of another chunk.
        follows_drift: Whether stale rows are moved by the mean change of the rows that have run.
    """

    def __init__(
        self,
        net: nn.Module,
        partition: Tensor,
        *,
        cross_chunk_grad_scale: float = 1.0,
        follows_drift: bool = False,
    ) -> None:
        self.net = net
        self.partition = partition
        self.cross_chunk_grad_scale = cross_chunk_grad_scale
        self.follows_drift = follows_drift
        self.live: dict[Key, Tensor] = {}
        """For each call the source rows of the last forward pass, ``[num_nodes, ...]``."""
        self.snapshot: dict[Key, Tensor] | None = None
        """Where stale rows are read instead, if not None."""

    def exact(self, *inputs: Tensor) -> Tensor:
        """Run the whole graph as one chunk; every row of every call becomes fresh."""
        return self._run(inputs, torch.zeros_like(self.partition), (0,))

    def chunked(self, *inputs: Tensor, order: Sequence[int]) -> Tensor:
        """Run the chunks in the given order; what later chunks still hold is read stale."""
        assert sorted(order) == sorted(set(self.partition.tolist()))
        return self._run(inputs, self.partition, order)

    def renew_snapshot(self) -> None:
        """Let later steps read the rows of the last forward pass, until renewed again."""
        self.snapshot = dict(self.live)

    def _run(self, inputs: Sequence[Tensor], partition: Tensor, order: Sequence[int]) -> Tensor:
        stale = self.live if self.snapshot is None else self.snapshot
        stale = stale | {key: rows for key, rows in self.live.items() if key[1] == "sum"}
        one_pass = _Pass(stale, self.cross_chunk_grad_scale, self.follows_drift)
        outputs = None
        for chunk in order:
            one_pass.enter(partition == chunk)
            with _intercepted(self.net, one_pass):
                result = self.net(*inputs)
            outputs = result if outputs is None else _where(one_pass.own, result, outputs)
        assert outputs is not None
        self.live = {key: rows.detach().clone() for key, rows in one_pass.fresh.items()}
        return outputs


class _Pass:
    """The masks and rows of one forward pass over all chunks."""

    def __init__(
        self, stale: dict[Key, Tensor], cross_chunk_grad_scale: float, follows_drift: bool
    ) -> None:
        self.stale = stale
        self.follows_drift = follows_drift
        self.cross_chunk_grad_scale = cross_chunk_grad_scale
        self.fresh: dict[Key, Tensor] = {}
        self.own = self.earlier = torch.zeros(0, dtype=torch.bool)
        self.calls: Counter[tuple[str, str]] = Counter()

    def enter(self, own: Tensor) -> None:
        """Go on to the chunk of the nodes ``own``, ``[num_nodes]``."""
        self.earlier = torch.zeros_like(own) if not self.own.numel() else self.earlier | self.own
        self.own = own
        self.calls.clear()

    def count(self, name: str, method: str) -> int:
        """Return the number of this call."""
        self.calls[name, method] += 1
        return self.calls[name, method] - 1

    def mix(self, key: Key, rows: Tensor) -> Tensor:
        """Return own rows from ``rows``, earlier chunks' as they were then, the rest stale."""
        mixed = rows
        if not bool((self.own | self.earlier).all()):
            stale = self.stale[key]  # a KeyError: read but never written
            if self.follows_drift and key[1] not in ("group", "sum"):
                stale = stale + self.drift(key, rows)
            mixed = _where(self.own, rows, stale)
        if key in self.fresh:
            scale = 1.0 if key[1] == "sum" else self.cross_chunk_grad_scale
            earlier = _scale_grad(self.fresh[key], scale)
            mixed = _where(self.earlier, earlier, mixed)
        known = self.fresh.get(key, rows)
        self.fresh[key] = _where(self.own, rows, known)
        return mixed

    def drift(self, key: Key, rows: Tensor) -> Tensor:
        """Return the mean change of all rows that have run, as if 32 more had not changed."""
        has_run = self.own | self.earlier
        present = _where(self.own, rows, self.fresh.get(key, rows)).detach()
        return (present - self.stale[key])[has_run].sum(0) / (has_run.sum() + 32)


def _where(nodes: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    """Return ``rows`` at ``nodes``, ``[num_nodes]``, and ``others`` elsewhere."""
    return torch.where(nodes.view(-1, *[1] * (rows.dim() - 1)), rows, others)


def _scale_grad(rows: Tensor, scale: float) -> Tensor:
    if not rows.requires_grad:
        return rows
    rows = rows.clone()
    rows.register_hook(lambda grad: grad * scale)
    return rows


@contextmanager
def _intercepted(net: nn.Module, one_pass: _Pass) -> Iterator[None]:
    """Mix the source rows of every message-passing call, for one forward pass."""
    convs = [(name, conv) for name, conv in net.named_modules() if isinstance(conv, MessagePassing)]
    with ExitStack() as stack:

        def swap(owner: object, **new: Any) -> None:
            stack.enter_context(mock.patch.multiple(owner, **new))

        for name, conv in convs:
            swap(conv, _decomposed_layers=1)  # channels do not see each other: it does not matter
            swap(conv, **{method: _wrapper(name, conv, method, one_pass) for method in METHODS})
        for module in {sys.modules[type(conv).__module__] for _, conv in convs}:
            if hasattr(module, "gcn_norm"):
                swap(module, gcn_norm=_mixed_norm(module.__name__, one_pass))
        yield


def _mixed_norm(name: str, one_pass: _Pass) -> Callable[..., Any]:
    """Return a ``gcn_norm`` for which a node's inverse root degree is a row like any other."""

    def norm(
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: Any = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        if edge_weight is None or not edge_weight.requires_grad:
            return gcn_norm(
                edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype
            )
        if add_self_loops:
            fill = 2.0 if improved else 1.0
            edge_index, edge_weight = add_remaining_self_loops(
                edge_index, edge_weight, fill, num_nodes
            )
        receiver = edge_index[1 if flow == "source_to_target" else 0]
        degrees = torch.zeros(num_nodes, dtype=edge_weight.dtype)
        root = degrees.index_add(0, receiver, edge_weight) ** -0.5
        number = one_pass.count(name, "gcn_norm")
        root = one_pass.mix((name, "gcn_norm", number, "degree"), root)
        return edge_index, root[edge_index[0]] * edge_weight * root[edge_index[1]]

    return norm


def source_arguments(conv: MessagePassing, method: str) -> set[str]:
    """Return the arguments that messages read on the source side."""
    read = [getattr(conv, reader) for reader in METHODS[method] if hasattr(conv, reader)]
    return {
        parameter.removesuffix("_j")
        for function in read
        for parameter in inspect.signature(function).parameters
        if parameter.endswith("_j")
    }


def _wrapper(name: str, conv: MessagePassing, method: str, one_pass: _Pass) -> Callable[..., Any]:
    original = getattr(conv, method)
    sources = source_arguments(conv, method)

    def call(edge_index: Tensor, size: Any = None, **kwargs: Any) -> Any:
        number = one_pass.count(name, method)
        for argument in sorted(sources & kwargs.keys()):
            value = kwargs[argument]
            rows = value[0] if isinstance(value, tuple) else value
            if rows is None:
                continue
            key = name, method, number, argument
            rows = one_pass.mix(key, rows.movedim(conv.node_dim, 0))
            rows = rows.movedim(0, conv.node_dim)
            kwargs[argument] = (rows, value[1]) if isinstance(value, tuple) else rows
        return original(edge_index, size=size, **kwargs)

    return call

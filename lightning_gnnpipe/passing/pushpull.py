"""Autograd function that exchanges rows and gradients between chunks.

Forward writes (pushes) the chunk's rows to the history and reads (pulls) its halo rows.
Backward runs over the chunks in reverse order. It adds the halo rows' gradients to a buffer, and
takes what later chunks added for this chunk's rows. Gradients of stale rows arrive after the
backward of their chunk, so they are dropped.

Source: GNNPipe (arXiv 2308.10087), as the exact gradient of what was computed: a stale row
is a constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from lightning_gnnpipe.passing.interfaces import CallKey, HaloStore, Tape
    from lightning_gnnpipe.types import ChunkView


class PushPull(torch.autograd.Function):
    """Append halo rows to a chunk's rows."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        store: HaloStore,
        key: CallKey,
        chunk: ChunkView,
        tape: Tape | None,
        is_linear: bool,
    ) -> Tensor:
        ctx.store, ctx.key, ctx.chunk, ctx.is_linear = store, key, chunk, is_linear
        if tape is None or not tape.is_replay:
            store.push(key, chunk, rows, keeps_old=tape is not None)
        if chunk.num_halo == 0:
            return rows.view_as(rows)
        wide = rows.new_empty((chunk.num_nodes + chunk.num_halo, *rows.shape[1:]))
        wide[: chunk.num_nodes] = rows
        halo = wide[chunk.num_nodes :]
        if tape is None:
            store.pull(key, chunk, halo)
        elif tape.is_replay:
            store.pull_again(key, chunk, halo, tape.stale[key])
        else:
            tape.stale[key] = store.pull(key, chunk, halo)
        return wide

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        chunk: ChunkView = ctx.chunk
        own = grad[: chunk.num_nodes]
        if chunk.num_halo:
            ctx.store.push_grad(ctx.key, chunk, grad[chunk.num_nodes :])
        received = ctx.store.pull_grad(ctx.key, chunk, is_linear=ctx.is_linear)
        both = own if received is None else own + received.to(own.dtype)
        return both, None, None, None, None, None


def push_pull(
    rows: Tensor,
    store: HaloStore,
    key: CallKey,
    chunk: ChunkView,
    tape: Tape | None,
    *,
    is_linear: bool,
) -> Tensor:
    """Return the chunk's rows, `[num_nodes, *]`, followed by its halo rows."""
    return cast(Tensor, cast(Any, PushPull).apply(rows, store, key, chunk, tape, is_linear))

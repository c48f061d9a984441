"""The one autograd function through which chunks see each other.

Forward: the chunk's rows are written to the history (push) and its halo rows are read from it
(pull).
Backward, run over the chunks in reverse order: the halo rows' gradient is added to the gradient
buffer, and what later chunks added for this chunk's rows flows on. A row read stale was consumed
before its gradient arrives: the gradient stays behind in the buffer, and is dropped.

Source: GNNPipe (arXiv 2308.10087), as the exact gradient of what was computed: a stale row
is a constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from lightning_gnnpipe.passing.interfaces import CallKey, HaloStore
    from lightning_gnnpipe.passing.running import Tape
    from lightning_gnnpipe.types import ChunkView


class PushPull(torch.autograd.Function):
    """Widen a chunk's rows by its halo rows."""

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
        """Return `[num_nodes + num_halo, *]` from `rows`, `[num_nodes, *]`."""
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
        """Return the gradient of the chunk's rows, those of later chunks included."""
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
    """Return the chunk's rows, `[num_nodes, *]`, and behind them its halo rows.

    Args:
        rows: The chunk's.
        store: The histories.
        key: Names the history.
        chunk: The chunk.
        tape: Where reads are noted, if activations are not kept.
        is_linear: Whether what is made of the rows is a weighted sum of them.
    """
    return cast(Tensor, cast(Any, PushPull).apply(rows, store, key, chunk, tape, is_linear))

"""Norms whose statistics are taken over all nodes, on one chunk.

Where the whole graph is one chunk they run as they are, and their statistics are kept. In a chunk
they normalise with the statistics of the last step, constants to autograd as stale rows are, and
gather this step's for the next. Running statistics of BatchNorm are updated once a step, with the
statistics of the whole graph, as full-batch training would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing.context import MessageContext
from lightning_gnnpipe.passing.interfaces import Moments, ShardLink

Formula = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def _batch_norm(norm: Any, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    if mean.requires_grad:
        scaled = (x - mean) * (var + norm.eps).rsqrt()
        return scaled if norm.weight is None else scaled * norm.weight + norm.bias
    return F.batch_norm(x, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)


def _graph_norm(norm: Any, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    centered = x - mean * norm.mean_scale
    spread = var + ((1 - norm.mean_scale) * mean) ** 2  # of x - mean_scale * mean, around zero
    return norm.weight * centered / (spread + norm.eps).sqrt() + norm.bias


def _pair_norm(norm: Any, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    centered = x - mean
    if norm.scale_individually:
        return norm.scale * centered / (norm.eps + centered.norm(2, -1, keepdim=True))
    return norm.scale * centered / (norm.eps + var.sum()).sqrt()


def _mean_subtraction(norm: Any, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return x - mean


def _layer_norm(norm: Any, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    center = mean.mean()
    spread = (var + (mean - center) ** 2).mean()
    out = (x - center) / (spread.sqrt() + norm.eps)
    return out if norm.weight is None else out * norm.weight + norm.bias


_FORMULAS: dict[type, Formula] = {
    nn.BatchNorm1d: _batch_norm,
    gnn.InstanceNorm: _batch_norm,
    gnn.GraphNorm: _graph_norm,
    gnn.PairNorm: _pair_norm,
    gnn.MeanSubtractionNorm: _mean_subtraction,
    gnn.LayerNorm: _layer_norm,
}


def find_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the norms of `module` with statistics over all nodes, by name."""
    return {name: m for name, m in module.named_modules() if has_statistics(m)}


def has_statistics(layer: nn.Module) -> bool:
    """Whether `layer` is a norm over all nodes that is right on chunks."""
    if type(layer) is gnn.LayerNorm:
        return layer.mode == "graph"
    return type(layer) in _FORMULAS or type(layer) in (gnn.BatchNorm, gnn.GraphSizeNorm)


@contextmanager
def whole_statistics(norms: Mapping[str, nn.Module], context: MessageContext) -> Iterator[None]:
    """Let `norms` normalise chunks with the statistics of the whole graph, within the block."""
    with ExitStack() as stack:
        for name, norm in norms.items():
            norm.__dict__["forward"] = _wrap(name, norm, context)
            stack.callback(norm.__dict__.pop, "forward")
        yield


def _wrap(name: str, norm: Any, context: MessageContext) -> Callable[..., Tensor]:
    original, kind = norm.forward, type(norm)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        store = context.store
        is_split = store is not None and store.shards is not None
        is_known = context.is_whole and context.is_replay and not is_split
        if store is None or is_known or not _uses_statistics(norm):
            return cast(Tensor, original(*args, **kwargs))
        x, *others = (value for value in (*args, *kwargs.values()) if value is not None)
        has_formula = kind in _FORMULAS and x.dim() == 2 and not others
        key = context.next_key(name)
        if kind is gnn.GraphSizeNorm and not others:
            return x * context.whole.num_nodes**-0.5
        if kind is gnn.BatchNorm and (is_split or not context.is_whole):
            return cast(Tensor, norm.module(x))  # around nn.BatchNorm1d
        moments: Moments | None
        if context.is_whole and store.shards is not None:
            if not has_formula:
                raise _refuse(name, norm, x)
            moments = None if context.is_replay else store.moments.put(key, x)
            if moments is None or not context.is_refresh:
                if moments is not None:
                    _update_running(norm, moments)
                return _normalize_over_shards(norm, x, store.shards)
        elif context.is_whole:
            moments = store.moments.put(key, x) if has_formula else None
            if moments is None or not context.is_refresh:
                result = cast(Tensor, original(*args, **kwargs))
                context.dtypes[key] = result.dtype
                return result
        elif has_formula:
            moments, complete = store.moments.exchange(key, context.chunk.index, x)
            if complete is not None:
                _update_running(norm, complete)
        else:
            raise _refuse(name, norm, x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        result = _FORMULAS[kind](norm, x, moments.mean.to(dtype), moments.var.to(dtype))
        return result.to(context.dtypes.get(key, result.dtype))

    return run


class _SumOverShards(torch.autograd.Function):
    """The sum of what all ranks of a stage have; each of them gets all of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, shards: ShardLink) -> Tensor:
        """Return the sum of `own` over ranks."""
        ctx.shards = shards
        return shards.sum(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients that ranks have for the sum."""
        return ctx.shards.sum(grad), None


def _normalize_over_shards(norm: Any, rows: Tensor, shards: ShardLink) -> Tensor:
    """Return the rows normalised by moments of those of all ranks, with gradients through both."""
    x = rows.to(torch.promote_types(rows.dtype, torch.float32))
    total = cast(Any, _SumOverShards).apply
    count = shards.sum(x.new_tensor([x.size(0)]))
    mean = total(x.sum(0), shards) / count
    var = total((x - mean).square().sum(0), shards) / count
    return _FORMULAS[type(norm)](norm, x, mean, var).to(rows.dtype)


def _uses_statistics(norm: Any) -> bool:
    """Whether `norm` looks at all rows now; in evaluation some have running statistics instead."""
    if type(norm) is nn.BatchNorm1d:
        return norm.training or norm.running_mean is None
    if type(norm) is gnn.InstanceNorm:
        return norm.training or not norm.track_running_stats
    return True


def _update_running(norm: Any, moments: Moments) -> None:
    """Update running statistics as one pass over all rows does."""
    is_tracking = getattr(norm, "track_running_stats", False) and norm.training
    if not is_tracking or norm.running_mean is None:
        return
    share = norm.momentum
    if isinstance(norm, nn.BatchNorm1d):  # PyG's InstanceNorm does not count
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        share = 1.0 / float(norm.num_batches_tracked) if share is None else share
    unbiased = moments.var * (moments.count / max(moments.count - 1, 1))
    with torch.no_grad():
        norm.running_mean.lerp_(moments.mean.to(norm.running_mean.dtype), share)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)


def _refuse(name: str, norm: nn.Module, x: Tensor) -> UnsupportedError:
    return UnsupportedError(
        explain(
            expected=f"'{name}', a {type(norm).__name__}, to be called with one tensor of shape "
            "[num_rows, channels]",
            found=f"shape {list(x.shape)}, or a batch vector",
            remedy="Leave out 'batch' (there is one graph), or train with num_chunks=1.",
        )
    )

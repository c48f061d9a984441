"""Norms with statistics over all nodes, on one chunk.

All these norms scale and shift channels: `Formula` computes both from mean and variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, cast

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import CallKey, MessageContext, Replacement
from lightning_gnnpipe.passing.edges import WHOLE
from lightning_gnnpipe.staleness import ExactStore, RowMoments, float_of
from lightning_gnnpipe.staleness.moments import KEPT, MEAN, NORM_MEAN, NORM_VAR, VAR

# From a norm, and mean and variance `[channels]`, to scale (None for 1) and shift `[channels]`.
Formula = Callable[[Any, Tensor, Tensor], tuple[Tensor | None, Tensor]]


def _batch_norm(norm: Any, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    scale = (var + norm.eps).rsqrt()
    if norm.weight is None:
        return scale, -mean * scale
    scale = scale * norm.weight
    return scale, norm.bias - mean * scale


def _graph_norm(norm: Any, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    spread = var + ((1 - norm.mean_scale) * mean) ** 2  # mean of (x - mean_scale * mean)^2
    scale = norm.weight * (spread + norm.eps).rsqrt()
    return scale, norm.bias - norm.mean_scale * mean * scale


def _pair_norm(norm: Any, mean: Tensor, var: Tensor) -> tuple[Tensor | None, Tensor]:
    if norm.scale_individually:
        return None, -mean
    scale = norm.scale * (norm.eps + var.sum()).rsqrt()
    return scale.repeat(mean.numel()), -mean * scale


def _mean_subtraction(norm: Any, mean: Tensor, var: Tensor) -> tuple[None, Tensor]:
    return None, -mean


def _layer_norm(norm: Any, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    center = mean.mean()
    spread = (var + (mean - center) ** 2).mean()
    scale = 1 / (spread.sqrt() + norm.eps)
    if norm.weight is None:
        return scale.repeat(mean.numel()), (-center * scale).repeat(mean.numel())
    scale = scale * norm.weight
    return scale, norm.bias - center * scale


_FORMULAS: dict[type, Formula] = {
    nn.BatchNorm1d: _batch_norm,
    gnn.InstanceNorm: _batch_norm,
    gnn.GraphNorm: _graph_norm,
    gnn.PairNorm: _pair_norm,
    gnn.MeanSubtractionNorm: _mean_subtraction,
    gnn.LayerNorm: _layer_norm,
}


_SCALED = (nn.BatchNorm1d, gnn.InstanceNorm, gnn.GraphNorm)  # by channel, by its variance


def has_statistics(layer: nn.Module) -> bool:
    """Whether `layer` is a norm over all nodes that is exact on chunks."""
    if type(layer) is gnn.LayerNorm:
        return layer.mode == "graph"
    return type(layer) in _FORMULAS or type(layer) in (gnn.BatchNorm, gnn.GraphSizeNorm)


def whole_statistics(
    norms: Mapping[str, nn.Module], context: MessageContext
) -> Iterator[Replacement]:
    """Yield replacements with which `norms` normalise chunks by statistics of the whole graph.

    On the whole graph they run unchanged, and their statistics are stored. A chunk uses statistics
    of the rows that have run in this step, and assumes that the remaining rows moved alike since
    the last step: see `RowMoments`. Gradients flow through them to all chunks that have run.
    BatchNorm updates running statistics once per step from all rows, as in full-batch training.
    These rows come from stale inputs, so validation replaces the statistics by its own.
    """
    for name, norm in norms.items():
        yield norm, {"forward": _wrap(name, norm, context)}


def _wrap(name: str, norm: Any, context: MessageContext) -> Callable[..., Tensor]:
    original, kind, prepare = norm.forward, type(norm), partial(_prepare, norm)

    @context.in_layer
    def run(*args: Any, **kwargs: Any) -> Tensor:
        store, is_whole = context.store, context.at.place == WHOLE
        shards = store.shards if is_whole and store is not None else None
        is_replay = context.is_replay
        x, *more = (*args, *kwargs.values())
        if more:
            more = [one for one in more if one is not None]
            if store is not None:
                more = [one for one in more if not _means_one_graph(one)]
        if kind is gnn.GraphSizeNorm and store is not None and not more:
            return x * context.at.whole.num_nodes**-0.5
        uses_statistics = norm.training or _uses_statistics(norm)
        if name in context.replaced and not uses_statistics:
            _replace_running(norm, x, context.next_key(name), context)
        is_part = shards is not None or not is_whole
        if store is None or not uses_statistics or (is_replay and not is_part):
            return original(*args, **kwargs)
        key = context.next_key(name)
        if kind is gnn.BatchNorm and is_part:
            return norm.module(x)  # an nn.BatchNorm1d, also wrapped
        has_formula = kind in _FORMULAS and x.dim() == 2 and not more
        if is_part and not has_formula:
            raise _refuse(name, norm, x)
        known: Sequence[Tensor] | None = None
        if is_whole and has_formula and not is_replay:
            # Inside `propagate` rows may be messages, which belong to no chunk.
            counts = None if context.is_passing else [c.num_nodes for c in context.at.plan.chunks]
            rows = x.detach() if context.live is None else x
            known = mean, var, count = store.moments.keep(key, rows, counts)
            if context.live is not None:
                context.live[key] = mean, var
            if context.is_refresh:
                result = _normalize(norm, x, mean, var)
                return result.to(context.dtypes.get(key, result.dtype))
            if shards is not None:
                update_running(norm, mean, var, count)
        if is_whole:
            if shards is not None:
                result = _normalize_over_shards(norm, x, shards, known)
            else:
                result = original(*args, **kwargs)
            context.dtypes[key] = result.dtype
            return result
        if context.live is not None:
            result = _normalize(norm, x, *context.live[key])
        elif isinstance(store, ExactStore):
            result = _normalize_exactly(norm, x, key, store, context)
        else:
            moments = store.moments.of(key, x)
            # The number of messages may differ between steps (dropped edges), that of nodes not.
            chunk = context.at.chunk
            moments.is_of_messages = context.is_passing or x.size(0) != chunk.num_nodes
            moments.prepare = prepare
            result = _normalize_part(norm, x, _Part(moments, chunk.index))
        return result.to(context.dtypes.get(key, result.dtype))

    return run


def _means_one_graph(value: Any) -> bool:
    """Whether an argument means a single graph: a batch vector of zeros, or the number 1."""
    if isinstance(value, Tensor):
        return value.dim() == 1 and not value.is_floating_point() and not value.any()
    return value == 1


def _replace_running(norm: Any, rows: Tensor, key: CallKey, context: MessageContext) -> None:
    """Replace running statistics by statistics of all rows, unless they are frozen."""
    if norm.running_mean is None or not norm.track_running_stats or norm.momentum == 0:
        return
    if isinstance(context.store, ExactStore):
        given = {"are_messages": context.is_passing}
        mean, var, count = context.store.statistics(key, context.at.chunk, rows, **given)
    elif context.store is not None:  # on shards
        mean, var, count = context.store.moments.keep(key, rows, None)
    else:
        rows = rows.to(float_of(rows.dtype))
        mean = rows.mean(0)
        var = (rows - mean).square().mean(0)
        count = mean.new_full((), rows.size(0))
    _write_running(norm, mean, var, count, 1.0)


def _normalize(norm: Any, rows: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Normalise rows, `[num_rows, channels]`, by mean and variance, `[channels]`."""
    dtype = float_of(rows.dtype)
    rows, mean, var = rows.to(dtype), mean.to(dtype), var.to(dtype)
    scale, shift = _FORMULAS[type(norm)](norm, mean, var)
    if scale is not None:
        zeros, ones = torch.zeros_like(mean), torch.ones_like(mean)
        # One kernel. F.batch_norm of some versions refuses an epsilon of 0.
        return torch.batch_norm(rows, scale, shift, zeros, ones, False, 0.0, 0.0, False)
    rows = rows + shift
    if isinstance(norm, gnn.PairNorm):
        return norm.scale * rows / (norm.eps + rows.norm(2, -1, keepdim=True))
    return rows


class _Part(NamedTuple):
    """Where a chunk's rows add to the statistics of a norm."""

    moments: RowMoments
    chunk: int


def _normalize_part(norm: Any, rows: Tensor, part: _Part) -> Tensor:
    """Normalise a chunk's rows by the estimates of all rows."""
    if type(norm) in _SCALED:
        weights = _weights(norm, float_of(rows.dtype))
        normalised: Tensor = cast(Any, _ScaledByChannel).apply(rows, *weights, norm.eps, part)
        return normalised
    rows, mean, var = cast(Any, _Estimated).apply(rows, part)
    return _normalize(norm, rows, mean, var)


def _weights(norm: Any, dtype: torch.dtype) -> list[Tensor | None]:
    found = list[Tensor | None]()
    for name in ("weight", "bias", "mean_scale"):
        one = getattr(norm, name, None)
        found.append(None if one is None else one.to(dtype))
    return found


class _Estimated(torch.autograd.Function):
    """Return a chunk's rows unchanged, and mean and variance of all rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: _Part) -> tuple[Tensor, Tensor, Tensor]:
        moments, chunk = ctx.part = part
        known, ctx.dtype = moments.numbers[chunk], rows.dtype
        kept = rows.to(moments.center.dtype, copy=True)  # the user may change rows in place
        moments.add(chunk, kept, 0.0)
        ctx.save_for_backward(kept)
        return rows.view_as(rows), known[MEAN].clone(), known[VAR].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, None]:
        moments, chunk = ctx.part
        by_var, by_mean = moments.factors[chunk]
        of_square = (-2 * var, by_var), (-mean, by_mean)
        shift, slope = moments.add_grad(chunk, -mean, of_square)
        (rows,) = ctx.saved_tensors
        return torch.addcmul(shift, rows, slope).add_(grad).to(ctx.dtype), None


class _ScaledByChannel(torch.autograd.Function):
    """BatchNorm, and with `mean_scale` GraphNorm, by the estimates of all rows."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean_scale: Tensor | None,
        eps: float,
        part: _Part,
    ) -> Tensor:
        moments, chunk = ctx.part = part
        known, ctx.dtype = moments.numbers[chunk], rows.dtype
        rows = rows.to(moments.center.dtype)
        moments.add(chunk, rows, eps)
        mean, var = known[MEAN], known[VAR]
        if mean_scale is not None:  # KEPT: what of the mean is not subtracted
            whole, mean = mean, torch.mul(mean, mean_scale, out=known[NORM_MEAN])
            kept = torch.sub(whole, mean, out=known[KEPT])
            var = torch.addcmul(var, kept, kept, out=known[NORM_VAR])
        # The table is written for other chunks before backward.
        ctx.save_for_backward(rows, weight, mean_scale)
        ctx.mean, ctx.var = mean, var
        out: Tensor = torch.native_batch_norm(rows, weight, bias, mean, var, False, 0.0, 0.0)[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, mean_scale = ctx.saved_tensors
        moments, chunk = ctx.part
        if grad.size(0):
            own, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                grad, rows, weight, ctx.mean, ctx.var, None, None, False, 0.0, [True] * 3
            )
        else:  # the kernel divides by the number of rows
            own, of_weight, of_bias = rows.clone(), *torch.zeros_like(moments.table[chunk, :2])
        by_mean, of_first, of_second, *more = moments.factors[chunk]
        scaled, of_scale = torch.mul(of_bias, by_mean), None
        of_mean = scaled
        if mean_scale is not None:
            by_kept, minus_whole = more
            scaled.addcmul_(of_weight, by_kept, value=-1)
            of_scale = minus_whole * scaled
            of_mean = torch.addcmul(of_weight * by_kept, mean_scale, scaled)
            of_square = (of_weight, of_first), (scaled, of_second)
        else:
            of_square = (of_weight, of_first), (of_bias, of_second)
        shift, slope = moments.add_grad(chunk, of_mean, of_square)
        own = own.addcmul_(rows, slope).add_(shift).to(ctx.dtype)
        of_weights = (None, None) if weight is None else (of_weight, of_bias)
        return own, *of_weights, of_scale, None, None


@torch.no_grad()
def _prepare(norm: Any, moments: RowMoments) -> tuple[Tensor, ...]:
    """Update running statistics; return factors for backward, `[num_chunks, channels]` each.

    1. From the bias's gradient to minus the mean's. 2. and 3. The factors of `of_square` in
    `RowMoments.add_grad`. GraphNorm also: 4. KEPT * weight / variance, 5. minus MEAN.
    Norms that are not in `_SCALED`: `RowMoments.slopes`.
    """
    if moments.is_complete:
        update_running(norm, *moments.present())
    by_var, by_mean = moments.slopes()
    if type(norm) not in _SCALED:
        return by_var, by_mean
    weight, _, mean_scale = _weights(norm, moments.center.dtype)
    var = moments.table[:, VAR if mean_scale is None else NORM_VAR]
    by_root, by_square = var.rsqrt(), var.reciprocal()
    if weight is not None:
        by_root, by_square = by_root * weight, by_square * weight
    if mean_scale is None:
        return by_root, by_square * by_var, by_root * by_mean
    by_kept = moments.table[:, KEPT] * by_square
    of_weight = by_square * by_var + by_kept * by_mean
    return by_root, of_weight, mean_scale * by_mean, by_kept, -moments.table[:, MEAN]


def _normalize_exactly(
    norm: Any, rows: Tensor, key: CallKey, store: ExactStore, context: MessageContext
) -> Tensor:
    """Normalise a chunk's rows by the statistics of all rows, as the norm itself would."""
    chunk = context.at.chunk
    known = store.statistics(key, chunk, rows, are_messages=context.is_passing)
    mean, var = cast(Any, _OfAllRows).apply(rows, *known, partial(store.sum_grads, key, chunk))
    if store.is_first(key) and not context.is_refresh:
        update_running(norm, *known)
    of_weights = () if type(norm) in _SCALED[:2] else (p.dtype for p in norm.parameters())
    dtype = context.dtypes[key] = reduce(torch.promote_types, of_weights, rows.dtype)
    return _normalize(norm, rows, mean, var).to(dtype)


class _OfAllRows(torch.autograd.Function):
    """Return mean and variance of all rows; backward adds up their gradients by `sum_grads`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        sum_grads: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.all = mean, count, sum_grads
        return mean.clone(), var.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mean: Tensor, of_var: Tensor) -> tuple[Tensor | None, ...]:
        mean, count, sum_grads = ctx.all
        (rows,) = ctx.saved_tensors
        of_mean, of_var = (sum_grads(torch.stack([of_mean, of_var])) / count).to(mean.dtype)
        grad = of_mean + 2 * of_var * (rows - mean)
        return grad.to(rows.dtype), None, None, None, None


def _normalize_over_shards(
    norm: Any, rows: Tensor, shards: Any, known: Sequence[Tensor] | None
) -> Tensor:
    """Normalise by statistics of all ranks' rows, with gradients through the statistics.

    `known`: their mean, variance and number; None where rows are recomputed in backward.
    """
    # Backward reads the rows. After a norm that does not, the user may change them in place.
    x = rows.to(float_of(rows.dtype), copy=type(norm) not in _SCALED)
    if known is None:
        own = x.detach()
        count = shards.sum(own.new_full((1,), own.size(0)))
        mean = shards.sum(own.sum(0)) / count
        known = mean, shards.sum((own - mean).square().sum(0)) / count, count
    mean, var, count = known
    mean, var = cast(Any, _OfAllRows).apply(x, mean.to(x.dtype), var.to(x.dtype), count, shards.sum)
    return _normalize(norm, x, mean, var).to(rows.dtype)


def _uses_statistics(norm: Any) -> bool:
    """Whether `norm` uses statistics of its input now, not running statistics."""
    if type(norm) is nn.BatchNorm1d:
        return uses_batch_statistics(norm)
    if type(norm) is gnn.InstanceNorm:
        return norm.training or not norm.track_running_stats
    return True


def uses_batch_statistics(norm: Any) -> bool:
    """Whether a BatchNorm uses the statistics of its input, not running statistics."""
    return bool(norm.training or norm.running_mean is None)


def tracks_statistics(norm: Any) -> bool:
    """Whether a training step updates running statistics of `norm`."""
    is_tracking = getattr(norm, "track_running_stats", False) and norm.training
    return is_tracking and norm.running_mean is not None


def update_running(norm: Any, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Update running statistics like one pass over `count` rows; `var` is biased."""
    if not tracks_statistics(norm):
        return
    share = norm.momentum
    if type(norm) is not gnn.InstanceNorm:  # has no counter
        norm.num_batches_tracked.add_(1)
        share = 1.0 / float(norm.num_batches_tracked) if share is None else share
    _write_running(norm, mean, var, count, share)


def _write_running(norm: Any, mean: Tensor, var: Tensor, count: Tensor, share: float) -> None:
    """Move running statistics by the fraction `share` towards `mean` and unbiased `var`."""
    unbiased = var * (count / (count - 1).clamp(min=1))
    with torch.no_grad():
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
        norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)


def _refuse(name: str, norm: nn.Module, x: Tensor) -> UnsupportedError:
    return UnsupportedError(
        expected=f"'{name}', a {type(norm).__name__}, to be called with one tensor of shape "
        "[num_rows, channels]",
        found=f"shape {list(x.shape)}, or a batch vector",
        remedy="Leave out 'batch' (there is one graph), or train with num_chunks=1.",
    )

"""Runs layers on all chunks of a small graph, layer by layer, so that no embedding is stale.

Layer l runs on all chunks, then layer l + 1. A layer that needs what another chunk has not yet
computed stops there, and starts again when all chunks have come so far. What chunks exchange are
live tensors, so autograd is exact. Random numbers are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from lightning_gnnpipe.chunks import PassInputs, run_segments
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.layers import NativeContext
from lightning_gnnpipe.passing import CallKey, MessageContext, Replacement
from lightning_gnnpipe.selfcheck.compare import gradients
from lightning_gnnpipe.stages import Layers, leaves_of
from lightning_gnnpipe.staleness import HistoryStore, MomentStore, RowMoments, mean_and_var


class Run:
    """One run of all layers over chunks or micro-batches, in the context of intercepted layers."""

    def __init__(
        self,
        layers: Layers,
        inputs: PassInputs,
        chunks: Sequence[Any],
        context: MessageContext | NativeContext,
    ) -> None:
        self._layers, self._inputs, self._chunks = layers, inputs, chunks
        names = leaves_of(layers.segments)
        self._leaves = [inputs.slice(chunk, names) for chunk in chunks]
        self._values = [dict(leaves) for leaves in self._leaves]
        for segment in layers.segments:
            waiting = list(zip(chunks, self._values, strict=True))
            while waiting:
                before = _progress(context), len(waiting)
                late = []
                for chunk, values in waiting:
                    given = {name: _copy(values[name]) for name in segment.inputs}
                    try:
                        run_segments([segment], given, chunk, context)
                    except _Waiting:
                        late.append((chunk, values))
                    else:
                        values.update({name: given[name] for name in segment.outputs})
                waiting = late
                if (_progress(context), len(waiting)) == before:
                    raise UnsupportedError(
                        expected="a layer to pass messages equally often on each chunk",
                        found="one that passes more on some chunks",
                        remedy="Call message passing whatever the values of nodes are.",
                    )

    def rows(self, name: str) -> Tensor:
        """Return a value of all chunks in the user's order; it is differentiable."""
        value, inputs = self._layers.values[name], self._inputs
        rows = torch.cat([values[name] for values in self._values])
        places = torch.cat([inputs.places(chunk, value) for chunk in self._chunks])
        return rows.new_zeros(inputs.num_places(value), *rows.shape[1:]).index_copy(0, places, rows)

    def gradients(
        self, roots: Sequence[Tensor], weights: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of `weights`, then of the call's `leaves` that need one."""
        parts = [t for one in self._leaves for t in one.values() if isinstance(t, Tensor)]
        parts = [part for part in parts if part.requires_grad]
        slots = [slot for slot, leaf in enumerate(leaves) if leaf.requires_grad]
        own = [leaves[slot] for slot in slots]  # which the head reads
        found = gradients(roots, [*weights, *own, *parts])
        for part, grad in zip(parts, found[len(weights) + len(own) :], strict=True):
            part.grad = grad
        for chunk, one in zip(self._chunks, self._leaves, strict=True):
            self._inputs.add_grads(chunk, one)
        of_head = found[len(weights) :][: len(own)]
        total = [
            self._inputs.take_grad(slot) + (0 if grad is None else grad)
            for slot, grad in zip(slots, of_head, strict=True)
        ]
        return [*found[: len(weights)], *total]


class _Waiting(BaseException):
    """A chunk needs what another one has not yet computed. User code catches no BaseException."""


def _copy(value: Any) -> Any:
    """Return a copy, which a layer may overwrite before it starts again."""
    return value.clone() if isinstance(value, Tensor) and value.is_floating_point() else value


def _progress(context: MessageContext | NativeContext) -> int:
    return context.num_given if isinstance(context, LiveContext) else 0


class LiveContext(MessageContext):
    """Layers on chunks whose halo rows and statistics are the other chunks' live tensors."""

    def __init__(self, plan: ChunkPlan) -> None:
        store = HistoryStore(plan.num_nodes, plan.num_chunks)
        self.all_chunks = plan
        store.moments = self._moments = MomentStore(plan.num_chunks, _LiveMoments)
        super().__init__(store, plan)
        self._given: dict[CallKey, dict[int, Tensor]] = {}

    @property
    def num_given(self) -> int:
        """How many tensors chunks have given each other."""
        moments = self._moments.calls.values()
        sums = sum(one.num_given for one in moments if isinstance(one, _LiveMoments))
        return sums + sum(map(len, self._given.values()))

    def exchange(
        self, rows: Tensor, store: HistoryStore, key: CallKey, chunk: Chunk, *, is_linear: bool
    ) -> Tensor:
        if self.is_whole:
            return rows.view_as(rows)
        given = self._given.setdefault(key, {})
        given.setdefault(chunk.index, rows.clone())
        if len(given) < self.all_chunks.num_chunks:
            raise _Waiting
        table = torch.cat([given[index] for index in sorted(given)])
        return torch.cat([rows, table[chunk.halo]])

    def weighted_sum(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return super().weighted_sum(*args, **kwargs) if self.is_whole else None


class _LiveMoments(RowMoments):
    """Statistics of the rows of all chunks."""

    @property
    def num_given(self) -> int:
        return len(self._own)

    @property
    def is_complete(self) -> bool:
        """False, so that no running statistics are updated."""
        return False

    def pooled(self, chunk: int, sums: Tensor) -> Tensor:
        self._own.setdefault(chunk, sums)
        if len(self._own) < self.num_chunks:
            raise _Waiting
        return torch.stack([self._own[index] for index in sorted(self._own)]).sum(0)

    def mean_and_var(self, chunk: int, sums: Tensor) -> tuple[Tensor, Tensor]:
        return mean_and_var(sums, self.center)


class _NoCheckpoint:
    """Runs a reentrant checkpoint's function: `autograd.grad` does not go through one."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


NO_CHECKPOINTS: Replacement = (checkpoint, {"CheckpointFunction": _NoCheckpoint})

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout}
_DROPOUTS |= {F.feature_alpha_dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout}


def _no_normal(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
    return torch.zeros(size, **kwargs) if like is None else torch.zeros_like(like)


def _mean_rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, **_: Any) -> Tensor:
    return F.leaky_relu(x, (lower + upper) / 2)


def _first_choice(p: Tensor, num_samples: int, *_: Any, **__: Any) -> Tensor:
    return p.new_zeros((*p.shape[:-1], num_samples), dtype=torch.int64)


def _softmax(logits: Tensor, tau: float = 1, hard: bool = False, *_: Any, **rest: Any) -> Tensor:
    soft = (logits / tau).softmax(rest.get("dim", -1))
    return soft.round() + (soft - soft.detach()) if hard else soft


_RANDOM: dict[Any, Callable[..., Tensor]] = {
    F.rrelu: _mean_rrelu,
    torch.normal: _no_normal,
    torch.rand_like: torch.zeros_like,
    torch.randn_like: torch.zeros_like,
    torch.rand: torch.zeros,
    torch.randn: torch.zeros,
    torch.bernoulli: lambda p, **_: (p > 0.5).to(p.dtype),
    F.gumbel_softmax: _softmax,
    torch.multinomial: _first_choice,
    torch.poisson: lambda rates, *_, **__: rates,
}
_RANDOM |= dict.fromkeys(
    (Tensor.normal_, Tensor.uniform_, Tensor.cauchy_, Tensor.random_),
    lambda x, *_, **__: x.zero_(),
)
_RANDOM |= dict.fromkeys(
    (Tensor.bernoulli_, Tensor.exponential_, Tensor.log_normal_, Tensor.geometric_),
    lambda x, *_, **__: x.fill_(1),
)

# Functions with dropout inside. Its rate is their only positional float.
_WITH_DROPOUT = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
_WITH_DROPOUT |= {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class NoRandomness(TorchFunctionMode):
    """Makes dropout the identity, even in training mode, and random numbers constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _RANDOM:
            kwargs.pop("generator", None)
            return _RANDOM[func](*args, **kwargs)
        if func in _WITH_DROPOUT:
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
            kwargs |= {name: 0.0 for name in kwargs if name == "dropout_p"}
        return func(*args, **kwargs)

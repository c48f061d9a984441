"""A module without its random numbers, so that two runs of it can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    Tensor.bernoulli_: lambda x, *_, **__: x.fill_(1),
    Tensor.normal_: lambda x, *_, **__: x.zero_(),
    Tensor.uniform_: lambda x, *_, **__: x.zero_(),
    Tensor.exponential_: lambda x, *_, **__: x.fill_(1),
    Tensor.log_normal_: lambda x, *_, **__: x.fill_(1),
    Tensor.cauchy_: lambda x, *_, **__: x.zero_(),
    Tensor.geometric_: lambda x, *_, **__: x.fill_(1),
    Tensor.random_: lambda x, *_, **__: x.zero_(),
    F.gumbel_softmax: _softmax,
    torch.multinomial: _first_choice,
    torch.poisson: lambda rates, *_, **__: rates,
}

# Functions with dropout inside. Its rate is their only positional float.
_WITH_DROPOUT = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
_WITH_DROPOUT |= {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class NoRandomness(TorchFunctionMode):
    """Makes dropout the identity, whatever `training` says, and random numbers constants."""

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

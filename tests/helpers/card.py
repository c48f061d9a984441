"""A GPU that is not there: tensors that say they are on `cuda:0`, and compute on the CPU.

Like CUDA's, an operation refuses a mixture of tensors on the card and on the host, except numbers.
`Card.waits` counts what the host would wait for: values that it reads, and copies in either
direction, except from and to pinned memory (`non_blocking=True`).
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
# The result, or its size, depends on values: the host reads them.
_READING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount"}
_READING |= {"_unique2", "unique_dim", "unique_consecutive"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_TO_HOST = {"tolist", "numpy", "cpu"}


class Card:
    """Counts operations, and waits by "file:line of the package, operation"."""

    def __init__(self) -> None:
        self.num_ops = 0
        self.waits: Counter[str] = Counter()

    def clear(self) -> None:
        """Start from zero."""
        self.num_ops = 0
        self.waits.clear()

    def wait(self, what: str) -> None:
        """Count a wait."""
        frames = [f for f in traceback.extract_stack() if "/lightning_gnnpipe/" in f.filename]
        place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "-"
        self.waits[f"{place}, {what}"] += 1


_card = Card()


class OnCard(Tensor):
    """A tensor on the card; its values are in `held`, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCard:
        made: OnCard = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )
        made.held = inner.detach()
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"OnCard({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        is_mixed = any(one.dim() and not isinstance(one, OnCard) for one in given)
        if is_mixed and name != "copy_" and name not in _INDEXING:
            raise RuntimeError(f"{name}: tensors on cuda:0 and on the CPU")
        _card.num_ops += 1
        is_pinned = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        is_mask = name in _INDEXING and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]
        )
        is_sized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in _READING or is_mask or is_sized or (is_mixed and not is_pinned):
            _card.wait(name)
        if name == "copy_" and not isinstance(args[0], OnCard):
            return args[0].copy_(args[1].held)
        inside = tree_map_only(OnCard, lambda one: one.held, (args, kwargs))
        found = tree_map_only(Tensor, OnCard, func(*inside[0], **inside[1]))
        return return_and_correct_aliasing(func, args, kwargs, found)


class _Placing(TorchFunctionMode):
    """Makes tensors on the card, and moves them there and back, as they are asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            return self._differentiate(func is torch.autograd.grad, *args, **kwargs)
        is_there = bool(args) and isinstance(args[0], OnCard)
        if name in _TO_HOST and is_there:
            _card.wait(name)
            return func(args[0].held)
        if name == "pin_memory":
            return args[0].clone()
        if name == "new_tensor" and is_there:
            _card.wait(name)
            return OnCard(args[0].held.new_tensor(*args[1:], **kwargs))
        if name == "__setitem__" and is_there and isinstance(args[1], list):
            _card.wait(name)
        if name == "to":
            return self._move(*args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            made = func(*args, **{**kwargs, "device": HOST})
            return made if isinstance(made, OnCard) else OnCard(made)
        return func(*args, **kwargs)

    def _differentiate(
        self, takes: bool, roots: Any, wanted: Any = (), grads: Any = None, **options: Any
    ) -> Any:
        """Run backward with this mode, which torch would switch off."""
        roots = (roots,) if isinstance(roots, Tensor) else tuple(roots)
        grads = options.get("grad_outputs" if takes else "grad_tensors", grads)
        grads = [None] * len(roots) if grads is None else grads
        ones = [torch.ones_like(r) if g is None else g for r, g in zip(roots, grads, strict=True)]
        with self:
            return torch.autograd.Variable._execution_engine.run_backward(
                roots,
                tuple(ones),
                bool(options.get("retain_graph")),
                False,
                tuple(wanted),
                allow_unreachable=True,
                accumulate_grad=not takes,
            )

    def _move(self, own: Tensor, *more: Any, **kwargs: Any) -> Any:
        given = [*more, *kwargs.values()]
        like = next((one for one in given if isinstance(one, Tensor)), None)
        dtype = next((one for one in given if isinstance(one, torch.dtype)), own.dtype)
        place = next((one for one in given if isinstance(one, str | torch.device)), own.device)
        if like is not None:
            dtype, place = like.dtype, like.device
        goes = torch.device(place).type == "cuda"
        if goes != isinstance(own, OnCard):
            if not kwargs.get("non_blocking"):
                _card.wait(f"to {place}")
            own = OnCard(own) if goes else own.held  # type: ignore[attr-defined]
        return own if dtype == own.dtype else own.type(dtype)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = HOST) -> _Generator:
        made: _Generator = super().__new__(cls, HOST)
        made.place = torch.device(device)
        return made

    device = property(lambda self: self.place)


def put(module: nn.Module) -> nn.Module:
    """Move the weights and buffers of `module` to the card."""
    for part in module.modules():
        for name, one in part._parameters.items():
            if one is not None:
                part._parameters[name] = nn.Parameter(OnCard(one.detach()))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnCard(buffer)
    return module


@contextmanager
def card() -> Iterator[Card]:
    """Let `cuda:0` be there within the block."""
    _card.clear()
    states = {"get_rng_state": lambda *_: torch.get_rng_state()}
    states |= {name: lambda *_: None for name in ("set_rng_state", "manual_seed", "synchronize")}
    generator = mock.patch.object(torch, "Generator", _Generator)
    with mock.patch.multiple(torch.cuda, **states), generator, _Placing():
        yield _card

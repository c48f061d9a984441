"""Stale rows in a plain Trainer: the tests' oracle in place of the network's forward."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from tests.helpers.orders import order_of_step
from tests.helpers.reference import StaleOracle


class Oracle(L.Callback):
    """Runs `net` in chunks with stale rows, as `staleness="constant"` does.

    Node n is in chunk n modulo `num_chunks`. The rows of each input are its own, and its first step
    is exact. So is a step after layers were frozen, which writes the rows anew.

    Args:
        num_chunks: Chunks of the graph.
        seed: Of the order of chunks.
    """

    def __init__(self, num_chunks: int, seed: int = 7) -> None:
        self.num_chunks, self.seed = num_chunks, seed
        self.oracles: dict[Any, StaleOracle] = {}
        self.frozen: dict[Any, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        net, loop = pl_module.net, trainer.fit_loop.epoch_loop
        own = net.forward

        def forward(x: Tensor, *args: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(x, *args)
            key, frozen = _key_of(net, (x, *args)), [p.requires_grad for p in net.parameters()]
            if self.frozen.setdefault(key, frozen) != frozen:
                self.frozen[key] = frozen
                if key in self.oracles:
                    return self.oracles[key].exact(x, *args)
            if key not in self.oracles:
                partition = torch.arange(x.size(0)) % self.num_chunks
                oracle = StaleOracle(_Own(net, own), partition)  # type: ignore[arg-type]
                self.oracles[key] = oracle
                return oracle.exact(x, *args)
            order = order_of_step(self.num_chunks, loop.total_batch_idx, self.seed)
            return self.oracles[key].chunked(x, *args, order=order)

        net.forward = forward

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.net.__dict__.pop("forward", None)


def _key_of(net: Any, args: tuple[Any, ...]) -> Any:
    """Return what rows are made of: arguments, and what the modules hold beside weights."""
    held = [*args, *net.buffers(), *(v for one in net.modules() for v in vars(one).values())]
    values = [_value_of(one) for one in held]
    return tuple(map(repr, values))


def _value_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.requires_grad else (value.shape, *value.flatten().tolist())
    return value if isinstance(value, bool | int | float | str) else None


class _Own:
    """The network with its own forward."""

    def __init__(self, net: Any, forward: Any) -> None:
        self.named_modules, self.forward = net.named_modules, forward

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

"""Stale rows in a plain Trainer: the tests' oracle in place of the network's forward."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_gnnpipe.graph import chunk_order
from tests.helpers.reference import StaleOracle


class Oracle(L.Callback):
    """Runs `net` in chunks with stale rows, as `staleness="constant"` does.

    Node n is in chunk n modulo `num_chunks`. The rows of each input are its own, as are those of
    other frozen layers: the first step on them is exact.

    Args:
        num_chunks: Chunks of the graph.
        seed: Of the order of chunks.
    """

    def __init__(self, num_chunks: int, seed: int = 7) -> None:
        self.num_chunks, self.seed = num_chunks, seed
        self.oracles: dict[Any, StaleOracle] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        net, loop = pl_module.net, trainer.fit_loop.epoch_loop
        own = net.forward

        def forward(x: Tensor, *args: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(x, *args)
            frozen = tuple(p.requires_grad for p in net.parameters())
            key = (frozen, *((one.shape, *one.flatten().tolist()) for one in (x, *args)))
            if key not in self.oracles:
                partition = torch.arange(x.size(0)) % self.num_chunks
                self.oracles[key] = StaleOracle(_Own(net, own), partition)  # type: ignore[arg-type]
                return self.oracles[key].exact(x, *args)
            order = chunk_order(
                self.num_chunks, epoch=loop.total_batch_idx, seed=self.seed, order="shuffled"
            )
            return self.oracles[key].chunked(x, *args, order=order)

        net.forward = forward

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.net.__dict__.pop("forward", None)


class _Own:
    """The network with its own forward."""

    def __init__(self, net: Any, forward: Any) -> None:
        self.named_modules, self.forward = net.named_modules, forward

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

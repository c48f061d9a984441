"""Train with the oracle: which epoch is exact, and what its stale rows are.

The rules, in the words of what switches them on:

- The first step is exact: no row has been written yet.
- ``StalenessWarmup(num_epochs=n)``: the first n steps are exact.
- ``EmbeddingRefresh(R, how="snapshot")``: stale rows are read from a copy of all rows,
  renewed after every exact step, and after step e if (e + 1) % R == 0.
- ``EmbeddingRefresh(R, how="exact")``: before step e > 0, if e % R == 0 and the step
  is not itself exact, all rows are computed anew with the present weights, without dropout.
- Otherwise stale rows are those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch_geometric.data import Data

from tests.helpers.modules import ReferenceModule
from tests.helpers.record import Step
from tests.helpers.reference import StaleOracle

Orders = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class Refresh:
    """The rules above as numbers; the default is no warm-up beyond the first step, no refresh."""

    num_exact_epochs: int = 1
    every_n_epochs: int = 0
    how: Literal["snapshot", "exact"] = "snapshot"

    def is_exact(self, epoch: int) -> bool:
        return epoch < max(1, self.num_exact_epochs)

    def recomputes_before(self, epoch: int) -> bool:
        due = self.every_n_epochs > 0 and epoch > 0 and epoch % self.every_n_epochs == 0
        return self.how == "exact" and due and not self.is_exact(epoch)

    def copies_after(self, epoch: int) -> bool:
        if self.how != "snapshot" or self.every_n_epochs == 0:
            return False
        return self.is_exact(epoch) or (epoch + 1) % self.every_n_epochs == 0


def train_with_oracle(
    module: ReferenceModule,
    data: Data,
    partition: Tensor,
    *,
    orders: Orders,
    refresh: Refresh,
    num_epochs: int,
    cross_chunk_grad_scale: float = 1.0,
    follows_drift: bool = False,
) -> list[Step]:
    """Train ``module.net`` in place, one optimizer step an epoch, and return the steps.

    Args:
        orders: Order of the chunks in each epoch, as a function of its number.
        cross_chunk_grad_scale: Factor on gradients that flow into fresh rows of another chunk.
        follows_drift: Whether stale rows are moved by the mean change of the rows that have run.
    """
    oracle = StaleOracle(
        module.net,
        partition,
        cross_chunk_grad_scale=cross_chunk_grad_scale,
        follows_drift=follows_drift,
    )
    inputs, optimizer = module.net_inputs(data), module.configure_optimizers()
    module.train()
    steps = []
    for epoch in range(num_epochs):
        if refresh.recomputes_before(epoch):
            module.eval()
            with torch.no_grad():
                oracle.exact(*inputs)
            module.train()
        if refresh.is_exact(epoch):
            outputs = oracle.exact(*inputs)
        else:
            outputs = oracle.chunked(*inputs, order=orders(epoch))
        if refresh.copies_after(epoch):
            oracle.renew_snapshot()
        steps.append(take_step(module, optimizer, outputs, data))
    return steps


def take_step(
    module: ReferenceModule, optimizer: torch.optim.Optimizer, outputs: Tensor, data: Data
) -> Step:
    loss = module.loss(outputs, data)
    optimizer.zero_grad()
    loss.backward()
    named = dict(module.named_parameters())
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    optimizer.step()
    weights = {name: p.detach().clone() for name, p in named.items()}
    return Step(outputs.detach(), loss.detach(), gradients, weights)

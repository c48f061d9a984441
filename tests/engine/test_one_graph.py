"""One graph that comes with a batch vector of zeros trains as one graph, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe import GNNPipeStrategy, StalenessWarmup

N, D = 40, 4


class Net(nn.Module):
    """Hands the batch vector on to its norms, and pools if it is to."""

    def __init__(self, norm: nn.Module, *, pools: bool = False, **given: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv(D, D) for _ in range(3))
        self.norm, self.pools, self.given = norm, pools, given

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(conv(x, edge_index), batch, **self.given).relu()
        return gnn.global_mean_pool(x, batch) if self.pools else x


class Module(L.LightningModule):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        return self.net(data.x, data.edge_index, data.batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Chunks(L.Callback):
    num_chunks = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, GNNPipeStrategy):
            self.num_chunks = trainer.strategy.collect_stats().num_chunks


def train(make: Callable[[], Net], *, has_pipe: bool, is_exact: bool = True) -> tuple[Module, int]:
    torch.manual_seed(0)
    module, chunks = Module(make()), Chunks()
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(N, D, generator=generator),
        edge_index=torch.randint(0, N, (2, 160), generator=generator),
        batch=torch.zeros(N, dtype=torch.long),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(num_chunks=4) if has_pipe else "auto",
        callbacks=[chunks, *([StalenessWarmup(num_epochs=9)] if has_pipe and is_exact else [])],
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([data], batch_size=None))
    return module, chunks.num_chunks


NORMS: dict[str, Callable[[], Net]] = {
    "GraphNorm": lambda: Net(gnn.GraphNorm(D)),
    "GraphNorm, sized": lambda: Net(gnn.GraphNorm(D), batch_size=1),
    "LayerNorm": lambda: Net(gnn.LayerNorm(D)),
    "InstanceNorm": lambda: Net(gnn.InstanceNorm(D)),
    "PairNorm": lambda: Net(gnn.PairNorm()),
    "GraphSizeNorm": lambda: Net(gnn.GraphSizeNorm()),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_batch_vector_of_zeros_is_one_graph(name: str) -> None:
    plain, _ = train(NORMS[name], has_pipe=False)
    exact, _ = train(NORMS[name], has_pipe=True)
    for ours, theirs in zip(exact.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert train(NORMS[name], has_pipe=True, is_exact=False)[1] == 4


def test_one_graph_that_is_pooled_is_a_batch_of_one() -> None:
    def make() -> Net:
        return Net(gnn.GraphNorm(D), pools=True)

    plain, _ = train(make, has_pipe=False)
    pooled, num_chunks = train(make, has_pipe=True, is_exact=False)
    for ours, theirs in zip(pooled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert num_chunks == 1

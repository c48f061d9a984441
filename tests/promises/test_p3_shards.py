"""P3 on the graph axis: how many shards there are changes no number; norms over all nodes."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.models import NodeClassifier
from tests.helpers.cases import slow

N, D = 60, 6


class Norms(nn.Module):
    """A message-passing layer in front of each kind of norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(D),
                gnn.BatchNorm(D),
                gnn.GraphNorm(D),
                gnn.GraphSizeNorm(),
                gnn.PairNorm(scale=3.0),
                gnn.InstanceNorm(D, affine=True, track_running_stats=True),
                gnn.MeanSubtractionNorm(),
                gnn.DiffGroupNorm(D, groups=2),
                gnn.LayerNorm(D),
            ]
        )
        # Without a bias, whose gradient is zero in front of a norm: Adam would scale up rounding.
        self.convs = nn.ModuleList([gnn.GCNConv(D, D, bias=False) for _ in self.norms])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + torch.tanh(norm(conv(x, edge_index)))
        return x


def fit(
    tmp_path: Path,
    num_chunks: int,
    *,
    shards: int,
    stages: int = 1,
    recompute: bool = False,
    validates: bool = False,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(N, D, generator=generator, dtype=torch.float64),
        edge_index=torch.randint(0, N, (2, 4 * N), generator=generator),
        y=torch.randint(0, D, (N,), generator=generator),
    )
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name] = torch.ones(N, dtype=torch.bool)
    L.seed_everything(1, verbose=False)
    module = NodeClassifier(Norms(), D, lr=0.05).double()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=shards * stages,
        max_epochs=5,
        strategy=GNNPipeStrategy(
            graph_parallel=shards, num_chunks=num_chunks, start_method="fork", recompute=recompute
        ),
        callbacks=[StalenessWarmup(num_epochs=2)],
        default_root_dir=tmp_path,
        limit_val_batches=1.0 if validates else 0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=FullGraphDataModule(data))
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("shards", "stages", "num_chunks", "recompute"),
    [slow(2, 1, 1, False), (2, 1, 4, True), slow(3, 1, 4, False), (2, 2, 4, False)],
)
def test_p3_norms_see_all_shards(
    shards: int, stages: int, num_chunks: int, recompute: bool, tmp_path: Path
) -> None:
    expected = fit(tmp_path, num_chunks, shards=1)
    found = fit(tmp_path, num_chunks, shards=shards, stages=stages, recompute=recompute)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize(
    ("shards", "stages", "num_chunks"), [slow(2, 1, 1), (2, 1, 4), slow(1, 2, 4)]
)
def test_p3_validation_replaces_running_statistics_on_all_ranks(
    shards: int, stages: int, num_chunks: int, tmp_path: Path
) -> None:
    """They belong to the rows that an exact pass computes: other ones than without validation."""
    expected = fit(tmp_path, num_chunks, shards=1, validates=True)
    found = fit(tmp_path, num_chunks, shards=shards, stages=stages, validates=True)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=key)
    if num_chunks > 1:
        left = fit(tmp_path, num_chunks, shards=1)
        assert not torch.allclose(
            left["net.norms.5.running_mean"], expected["net.norms.5.running_mean"]
        )

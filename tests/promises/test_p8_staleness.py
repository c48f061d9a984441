"""P8: the simulator's list of stale reads is what the engine read; the monitor reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnnpipe import (
    EmbeddingRefresh,
    FullGraphDataModule,
    StalenessMonitor,
    StalenessWarmup,
)
from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.models import GNN, NodeClassifier
from lightning_gnnpipe.staleness import StalenessMethod
from tests.helpers.orders import order_of_step
from tests.helpers.trainers import quiet_trainer

N, K, SEED = 40, 5, 11
ASSIGNMENT = torch.arange(N) * K // N


class StaleRecorder(L.Callback):
    """Writes each training step's stale reads, by layer, and the logged share and age."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        layers = trainer.strategy.collect_staleness()
        pairs = {layer: sorted(one.stale_pairs) for layer, one in layers.items()}
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.steps.append({"pairs": pairs, **logged})
        if trainer.is_global_zero:
            torch.save(self.steps, self.folder / "stale.pt")


def graph() -> Data:
    """A ring with a few long chords: not every chunk reads every other."""
    source = torch.arange(N)
    edges = torch.stack([source, (source + 1) % N])
    chords = torch.tensor([[0, 3, 20, 33], [17, 39, 9, 2]])
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(N, 4, generator=generator),
        edge_index=torch.cat([edges, chords], dim=1),
        y=torch.randint(0, 3, (N,), generator=generator),
    )


def run(
    folder: Path, *callbacks: L.Callback, num_stages: int = 1, **piped: Any
) -> list[dict[str, Any]]:
    L.seed_everything(SEED, verbose=False)
    callbacks = (*callbacks, StalenessMonitor(), StaleRecorder(folder))
    piped["partition"] = ASSIGNMENT
    trainer = quiet_trainer(num_stages, piped, max_epochs=6, callbacks=list(callbacks))
    module = NodeClassifier(GNN(4, 6, 3, num_layers=3, dropout=0.0, conv="sage"), 3)
    trainer.fit(module, datamodule=FullGraphDataModule(graph()))
    steps: list[dict[str, Any]] = torch.load(folder / "stale.pt")
    return steps


@pytest.mark.parametrize(("num_stages", "weights"), [(1, "whole"), (2, "staged")])
def test_p8_stale_reads_are_of_chunks_that_come_later(
    num_stages: int, weights: str, tmp_path: Path
) -> None:
    """Embeddings of validation have not drifted: without dropout the next step writes the same."""
    chunks = plan_from_assignment(graph().edge_index, N, ASSIGNMENT).chunks
    sources = {chunk.index: chunk.halo_chunks for chunk in chunks}
    counts = [dict(zip(one.halo_chunks, one.halo_counts, strict=True)) for one in chunks]
    num_rows = sum(sum(each.values()) for each in counts)
    seen = set()
    callbacks = StalenessWarmup(num_epochs=2), EmbeddingRefresh(1)
    steps = run(tmp_path, *callbacks, num_stages=num_stages, weights=weights)
    for epoch, step in enumerate(steps):
        order = order_of_step(K, epoch, SEED)
        later = {(reader, source) for i, reader in enumerate(order) for source in order[i:]}
        pairs = {(reader, source) for reader in sources for source in sources[reader]}
        expected = [] if epoch < 2 else sorted(pairs & later)
        share = sum(counts[reader][source] for reader, source in expected) / num_rows
        assert [step["pairs"].get(layer, []) for layer in range(3)] == [expected] * 3
        assert step["history/stale_frac"] == pytest.approx(share)
        assert step["history/age_epochs"] == (1.0 if expected else 0.0)
        if epoch:
            assert step["history/drift"] == pytest.approx(0, abs=1e-6)
        seen.add(tuple(expected))
    assert len(seen) > 2, "the order of the chunks was not shuffled"


def test_a_snapshot_grows_old_until_it_is_renewed(tmp_path: Path) -> None:
    """Renewed after epochs 0 (exact), 2 and 5: ages 1, 2, 1, 2, 3."""
    steps = run(tmp_path, method=StalenessMethod(snapshot_steps=3))
    assert [step["history/age_epochs"] for step in steps] == [0, 1, 2, 1, 2, 3]


def test_drift_is_positive_once_weights_move(tmp_path: Path) -> None:
    steps = run(tmp_path, staleness="constant")
    assert steps[-1]["history/drift"] > 0
    assert steps[-1]["history/drift/layer_2"] > 0

"""Random bytes and truncations of a checkpoint: it loads, or is refused; no code runs, no hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.errors import CheckpointError
from lightning_gnnpipe.models import GNN, NodeClassifier

NUM_RUNS = int(os.environ.get("GNNPIPE_FUZZ", "30"))


def fit(folder: Path, resume: Path | None = None) -> None:
    ring = torch.arange(12)
    data = Data(
        x=torch.eye(12), edge_index=torch.stack([ring, (ring + 1) % 12]), y=(ring > 5).long()
    )
    L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(num_chunks=2, self_check=False),
        max_epochs=2,
        callbacks=[ModelCheckpoint(folder, filename="one", every_n_epochs=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        num_sanity_val_steps=0,
    ).fit(
        NodeClassifier(GNN(12, 4, 2, num_layers=2), 2),
        datamodule=FullGraphDataModule(data),
        ckpt_path=resume,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole")
    fit(folder)
    yield folder / "one.ckpt"


@settings(
    max_examples=NUM_RUNS,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_damaged_file_loads_or_is_refused(whole: Path, data: st.DataObject) -> None:
    ident = torch.load(whole, weights_only=True)["gnnpipe"]["histories"]
    histories = whole.parent / ".gnnpipe" / ident / "stage_0.pt"
    target = data.draw(st.sampled_from([whole, histories]))
    content = target.read_bytes()
    damaged = bytearray(content)
    match data.draw(st.sampled_from(["truncated", "changed", "random"])):
        case "truncated":
            damaged = damaged[: data.draw(st.integers(0, len(content) - 1))]
        case "changed":
            for _ in range(data.draw(st.integers(1, 8))):
                damaged[data.draw(st.integers(0, len(content) - 1))] = data.draw(
                    st.integers(0, 255)
                )
        case "random":
            damaged = bytearray(data.draw(st.binary(max_size=4096)))
    target.write_bytes(damaged)
    try:
        fit(whole.parent / "again", whole)
    except (CheckpointError, RuntimeError, KeyError, TypeError, ValueError):
        pass  # refused: by the strategy, or by Lightning's own look at weights and loops
    finally:
        target.write_bytes(content)

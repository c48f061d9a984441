"""Two hundred epochs with all there is: no growth of memory, file handles or threads."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch_geometric.data import Data

from lightning_gnnpipe import (
    FullGraphDataModule,
    GNNPipeStrategy,
    StalenessMonitor,
    StalenessWarmup,
)
from lightning_gnnpipe.models import GCNII, NodeClassifier

WARM, LAST, NUM_LOOKS = 60, 200, 5
MIB = 2**20


class Watch(L.Callback):
    """Writes the least that this rank's process holds, around epoch `WARM` and at the end.

    The least of some epochs: a message that is still on its way holds a tensor for a moment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[int, dict[str, int]] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for end in (WARM, LAST):
            if end - NUM_LOOKS < trainer.current_epoch + 1 <= end:
                now = look()
                before = self.found.setdefault(end, now)
                self.found[end] = {name: min(before[name], now[name]) for name in now}
        path = self.folder / f"rank_{trainer.global_rank}.json"
        path.write_text(json.dumps([*self.found.values()]))


def look() -> dict[str, int]:
    gc.collect()
    process = psutil.Process()
    return {
        "rss": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "tensors": sum(isinstance(one, torch.Tensor) for one in gc.get_objects()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_two_hundred_epochs_leave_nothing_behind(
    num_stages: int, recompute: bool, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(400, 8, generator=generator),
        edge_index=torch.randint(400, (2, 2000), generator=generator),
        y=torch.randint(3, (400,), generator=generator),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=GNNPipeStrategy(
            num_chunks=6, start_method="fork", recompute=recompute, staleness="gnnpipe"
        ),
        max_epochs=LAST,
        callbacks=[
            StalenessWarmup(num_epochs=3),
            StalenessMonitor(),
            ModelCheckpoint(tmp_path, every_n_epochs=10),
            Watch(tmp_path),
        ],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = NodeClassifier(GCNII(8, 16, 3, num_layers=6, dropout=0.2), 3)
    trainer.fit(module, datamodule=FullGraphDataModule(data))
    for rank in range(num_stages):
        warm, last = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        for name in ("files", "threads", "tensors"):
            assert last[name] <= warm[name], (rank, name, warm, last)
        assert last["rss"] - warm["rss"] < 12 * MIB, (rank, warm, last)

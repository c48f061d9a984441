"""P7: a rank that raises, is killed or stalls ends all ranks, soon, with the cause shown."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta

import lightning as L
import torch

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.models import GCN, NodeClassifier
from torch_geometric.data import Data

torch.set_num_threads(1)
how, rank, start_method = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Classifier(NodeClassifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 2 and self.trainer.global_rank == rank:
            self.fail()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        print(f"rank {self.trainer.global_rank} is process {os.getpid()}", flush=True)

    def fail(self):
        if how == "raise":
            raise KeyError("the user's mistake")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "stall":
            print("stalling now", flush=True)
            time.sleep(300)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(30, 4, generator=generator),
        edge_index=torch.randint(0, 30, (2, 90), generator=generator),
        y=torch.randint(0, 3, (30,), generator=generator),
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=50, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=GNNPipeStrategy(start_method=start_method, timeout=timedelta(seconds=8)),
    )
    trainer.fit(Classifier(GCN(4, 8, 3, num_layers=4), 3), datamodule=FullGraphDataModule(data))
    print("finished", flush=True)
"""

CASES = [
    ("raise", 0, "popen", "the user's mistake"),
    ("raise", 1, "popen", "the user's mistake"),
    ("raise", 1, "fork", "the user's mistake"),
    ("kill", 1, "popen", "another rank has failed|SIGKILL|exit code"),
    ("kill", 0, "fork", "SIGKILL"),
    ("stall", 1, "popen", "did not answer within 8 s"),
]


@pytest.mark.parametrize(("how", "rank", "start_method", "cause"), CASES)
def test_p7_all_ranks_end_with_the_cause(
    how: str, rank: int, start_method: str, cause: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, str(script), how, str(rank), start_method],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PATH": "", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    text = run.stdout + run.stderr
    assert run.returncode != 0
    assert "finished" not in run.stdout
    assert re.search(cause, text), text[-3000:]
    assert time.monotonic() - started < 80
    for pid in re.findall(r"is process (\d+)", text):
        assert not is_alive(int(pid)), f"process {pid} is left over"


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/cmdline")
    deadline = time.monotonic() + 15
    while path.exists() and b"train.py" in path.read_bytes():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False

"""A program that has done its work ends with status 0: gloo's threads end before Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import atexit, sys
from pathlib import Path


def names():
    return {one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")}


def say():  # the first that is registered runs last
    print(f"rank {trainer.global_rank} ends with gloo: {'pt_gloo_runloop' in names()}", flush=True)


atexit.register(say)

import lightning as L
import torch
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.models import GCN, NodeClassifier

torch.set_num_threads(1)
ring = torch.arange(30)
data = Data(
    x=torch.eye(30),
    edge_index=torch.stack([ring, (ring + 1) % 30]),
    y=(ring % 3),
)
options = {
    "pipe": {},
    "hybrid": {"num_stages": 2, "graph_parallel": 2},
    "async": {"num_stages": 1, "graph_parallel": 2, "async_halo": True},
    "fails": {},
}[sys.argv[1]]
trainer = L.Trainer(
    accelerator="cpu", devices=4 if sys.argv[1] == "hybrid" else 2, max_epochs=4, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    strategy=GNNPipeStrategy(num_chunks=3, **options),
)


class Stops(L.Callback):
    def on_train_epoch_end(self, trainer, *_):
        assert "pt_gloo_runloop" in names()
        if sys.argv[1] == "fails" and trainer.current_epoch == 2:
            raise RuntimeError("stopped on purpose")


trainer.callbacks.append(Stops())
module = NodeClassifier(GCN(30, 8, 3, num_layers=4, dropout=0.1), 3)
trainer.fit(module, datamodule=FullGraphDataModule(data))
"""


def run(tmp_path: Path, how: str) -> tuple[int, str, str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, str(script), how],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": os.environ.get("PATH", ""), **environment},
        check=False,
    )
    return process.returncode, process.stdout, process.stderr


linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")


@linux
@pytest.mark.parametrize(("how", "num_ranks"), [("pipe", 2), ("hybrid", 4), ("async", 2)])
def test_threads_of_gloo_end_before_the_interpreter(
    tmp_path: Path, how: str, num_ranks: int
) -> None:
    code, out, errors = run(tmp_path, how)
    assert code == 0, errors[-3000:]
    for rank in range(num_ranks):
        assert f"rank {rank} ends with gloo: False" in out


@linux
def test_a_run_that_fails_waits_for_nobody(tmp_path: Path) -> None:
    """Its groups are left as they are."""
    code, out, errors = run(tmp_path, "fails")
    assert code != 0
    assert "stopped on purpose" in errors
    assert "rank 0 ends with gloo: True" in out

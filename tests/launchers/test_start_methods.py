"""However processes are started, weights come back to the one that called `fit`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys

import lightning as L
import torch
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.models import GNN, NodeClassifier

torch.set_num_threads(1)


class Late(NodeClassifier):
    '''Makes its layers when the Trainer asks for them.'''

    def __init__(self):
        super().__init__(torch.nn.Identity(), 3)

    def configure_model(self):
        if isinstance(self.net, torch.nn.Identity):
            torch.manual_seed(3)
            self.net = GNN(30, 8, 3, num_layers=4, dropout=0.1)


if __name__ == "__main__":
    num_stages, start_method = int(sys.argv[1]), sys.argv[2]
    ring = torch.arange(30)
    data = Data(
        x=torch.eye(30), edge_index=torch.stack([ring, (ring + 1) % 30]), y=(ring % 3)
    )
    L.seed_everything(0, verbose=False)
    module = Late() if sys.argv[3] == "late" else NodeClassifier(
        GNN(30, 8, 3, num_layers=4, dropout=0.1), 3
    )
    for devices in (1, num_stages) if sys.argv[3] == "twice" else (num_stages,):
        trainer = L.Trainer(
            accelerator="cpu", devices=devices, max_epochs=4, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            strategy=GNNPipeStrategy(start_method=start_method, num_chunks=3),
        )
        trainer.fit(module, datamodule=FullGraphDataModule(data))
    if trainer.global_rank == 0:
        total = sum(p.double().sum().item() for p in module.net.parameters())
        print(f"ends with {total:.6f}", flush=True)
"""


def start(
    tmp_path: Path, num_stages: int, start_method: str, kind: str
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), str(num_stages), start_method, kind],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )


def run(tmp_path: Path, num_stages: int, start_method: str, kind: str) -> str:
    done = start(tmp_path, num_stages, start_method, kind)
    assert done.returncode == 0, done.stderr[-3000:]
    [found] = [line for line in done.stdout.splitlines() if line.startswith("ends with")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "late"])
def test_all_ways_of_starting_give_the_same_weights(kind: str, tmp_path: Path) -> None:
    expected = run(tmp_path, 1, "popen", kind)
    # Lightning makes late layers in the processes it has forked alone.
    ways = {"plain": ["popen", "spawn", "fork", "forkserver"], "late": ["popen"]}
    assert [run(tmp_path, 2, way, kind) for way in ways[kind]] == [expected] * len(ways[kind])


@pytest.mark.slow
def test_trainers_of_other_numbers_of_devices_in_one_script(tmp_path: Path) -> None:
    """A rank that runs the script from its beginning says so; the remedy works."""
    failed = start(tmp_path, 2, "popen", "twice")
    assert failed.returncode != 0
    assert "the same number of devices as in the Trainer that started this process" in failed.stderr
    assert "IndexError" not in failed.stderr
    run(tmp_path, 2, "spawn", "twice")

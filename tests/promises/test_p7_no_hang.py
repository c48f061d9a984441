"""P7: a rank that raises, is killed, stalls or is told to stop ends all ranks, with the cause."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
from datetime import timedelta

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_gnnpipe.comm.transport as transport
import lightning_gnnpipe.chunks.step as steps
from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.saving import sidecar
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.models import GIN, GNN, GraphClassifier, NodeClassifier
from lightning_gnnpipe.trainer.replay import StepReplay
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
where, how, rank, start_method, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:6]
options = eval(sys.argv[6])
devices, num_layers = options.pop("devices", 2), options.pop("num_layers", 4)
current = None


def fail(place):
    trainer = current
    if place != where or trainer is None or trainer.global_rank != rank:
        return
    if where != "mesh" and (trainer.current_epoch != 2 or trainer.sanity_checking):
        return
    if how == "raise":
        raise KeyError("the user's mistake")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "stall":
        print("stalling now", flush=True)
        time.sleep(300)
    if how.startswith("SIG"):
        os.kill(os.getppid() if how == "SIGTERM-parent" else os.getpid(),
                getattr(signal, how.removesuffix("-parent")))
    if how == "SIGTERM-parent":  # which sends it on
        deadline = time.monotonic() + 5
        while not trainer.strategy._processes.signals.received and time.monotonic() < deadline:
            time.sleep(0.01)


def failing(name, work):
    def run(*args, **kwargs):
        fail(name)
        return work(*args, **kwargs)
    return run


for op, method in list(steps._METHODS.items()):
    steps._METHODS[op] = failing(op.name, method)
sidecar.write_stage = failing("save", sidecar.write_stage)
Transport.exchange = failing("exchange", Transport.exchange)
Transport.start_sum = failing("average", Transport.start_sum)
transport.make_mesh = failing("mesh", transport.make_mesh)


StepReplay.__call__ = failing("loss", StepReplay.__call__)


class Fails:
    def training_step(self, batch, batch_idx):
        fail("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        fail("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self):
        print(f"rank {self.trainer.global_rank} is process {os.getpid()}", flush=True)


class OfNodes(Fails, NodeClassifier): ...


class OfGraphs(Fails, GraphClassifier): ...


class Watches(L.Callback):
    def on_train_batch_end(self, *_):
        fail("callback")


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(30, 4, generator=generator),
        edge_index=torch.randint(0, 30, (2, 90), generator=generator),
        y=torch.randint(0, 3, (30,), generator=generator),
    )
    saver = ModelCheckpoint(folder, every_n_epochs=3 if where == "save" else 1000)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, max_epochs=50, logger=False,
        callbacks=[Watches(), saver], enable_progress_bar=False, enable_model_summary=False,
        strategy=GNNPipeStrategy(
            start_method=start_method, timeout=timedelta(seconds=8), **options
        ),
    )
    current = trainer
    if "data_parallel" in options or "schedule" in options:
        data.y = data.y[:1]
        graphs = DataLoader([data] * 12, batch_size=3)
        net = GIN(4, 8, 3, num_layers=num_layers)
        trainer.fit(OfGraphs(net, 3), graphs, graphs)
    else:
        net = GNN(4, 8, 3, num_layers=num_layers)
        trainer.fit(OfNodes(net, 3), datamodule=FullGraphDataModule(data))
    print("ended by itself", flush=True)
"""

MISTAKE = "the user's mistake"
LOST = "another rank has failed|SIGKILL|exit code|terminated with code -9"
RANK_OF = {"F": 0, "B": 1, "SEND_F": 0, "RECV_F": 1, "SEND_B": 1, "RECV_B": 0}
CASES = [
    ("training_step", "raise", 0, "popen", MISTAKE),
    ("training_step", "raise", 1, "popen", MISTAKE),
    ("training_step", "kill", 1, "popen", LOST),
    ("training_step", "kill", 0, "fork", "SIGKILL"),
    ("training_step", "stall", 1, "popen", "did not answer within 8 s"),
    ("validation_step", "raise", 1, "fork", MISTAKE),
    ("validation_step", "kill", 1, "fork", "SIGKILL"),
    ("callback", "raise", 0, "fork", MISTAKE),
    ("callback", "kill", 1, "fork", "SIGKILL"),
    ("save", "raise", 1, "fork", MISTAKE),
    ("save", "kill", 0, "fork", "SIGKILL"),
    ("save", "stall", 1, "fork", "did not answer within 8 s"),
    *((op, "raise", rank, "fork", MISTAKE) for op, rank in RANK_OF.items()),
    *((op, "kill", rank, "fork", "SIGKILL") for op, rank in RANK_OF.items()),
]


def run(tmp_path: Path, *arguments: object, **options: object) -> tuple[int, str, float]:
    """Run the script; return its exit status, what it printed and how long it took in seconds.

    `options` are the strategy's.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            *map(str, arguments),
            str(tmp_path / "checkpoints"),
            repr(options),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    text = done.stdout + done.stderr
    for pid in re.findall(r"is process (\d+)", text):
        assert not is_alive(int(pid)), f"process {pid} is left over"
    return done.returncode, text, time.monotonic() - started


@pytest.mark.parametrize(("where", "how", "rank", "start_method", "cause"), CASES)
def test_p7_all_ranks_end_with_the_cause(
    where: str, how: str, rank: int, start_method: str, cause: str, tmp_path: Path
) -> None:
    status, text, seconds = run(tmp_path, where, how, rank, start_method)
    assert status != 0
    assert "ended by itself" not in text
    assert re.search(cause, text), text[-3000:]
    assert seconds < 80


@pytest.mark.parametrize(
    ("how", "rank", "is_async", "cause"),
    [
        ("raise", 0, False, MISTAKE),
        ("kill", 1, False, "SIGKILL"),
        ("kill", 0, True, "SIGKILL"),
        ("stall", 1, True, "did not answer within 8 s"),
    ],
)
def test_p7_a_lost_shard_ends_all_ranks(
    how: str, rank: int, is_async: bool, cause: str, tmp_path: Path
) -> None:
    options = {"graph_parallel": 2, "async_halo": is_async, "halo_codec": "int1"}
    status, text, seconds = run(tmp_path, "exchange", how, rank, "fork", **options)
    assert status != 0
    assert "ended by itself" not in text
    assert re.search(cause, text), text[-3000:]
    assert seconds < 60


@pytest.mark.parametrize(
    ("where", "how", "rank", "schedule", "cause"),
    [
        ("F", "kill", 0, "1f1b", "SIGKILL"),
        ("B", "raise", 1, "1f1b", MISTAKE),
        ("loss", "kill", 1, "1f1b", "SIGKILL"),
        ("loss", "stall", 1, "1f1b", "did not answer within 8 s"),
        ("SEND_B", "kill", 1, "interleaved", "SIGKILL"),
        ("RECV_F", "raise", 0, "interleaved", MISTAKE),
    ],
)
def test_p7_a_rank_lost_between_forward_and_back_ends_all(
    where: str, how: str, rank: int, schedule: str, cause: str, tmp_path: Path
) -> None:
    options = {"schedule": schedule, "num_chunks": 3}
    status, text, seconds = run(tmp_path, where, how, rank, "fork", **options)
    assert status != 0
    assert "ended by itself" not in text
    assert re.search(cause, text), text[-3000:]
    assert seconds < 80


@pytest.mark.parametrize(
    ("where", "how", "rank", "start_method", "cause"),
    [
        ("training_step", "raise", 2, "fork", MISTAKE),
        ("validation_step", "kill", 3, "fork", "SIGKILL"),
        ("B", "kill", 3, "fork", "SIGKILL"),
        ("F", "stall", 1, "fork", "did not answer within 8 s"),
        ("average", "kill", 2, "fork", "SIGKILL"),
    ],
)
def test_p7_a_rank_lost_in_any_replica_ends_all(
    where: str, how: str, rank: int, start_method: str, cause: str, tmp_path: Path
) -> None:
    """Two replicas of two stages, on batches of graphs."""
    options = {"data_parallel": 2, "num_chunks": 3, "devices": 4}
    status, text, seconds = run(tmp_path, where, how, rank, start_method, **options)
    assert status != 0
    assert "ended by itself" not in text
    assert re.search(cause, text), text[-3000:]
    assert seconds < 80


def test_p7_sigterm_to_one_replica_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    options = {"data_parallel": 2, "num_chunks": 3, "devices": 4}
    _, text, _ = run(tmp_path, "training_step", "SIGTERM", 3, "fork", **options)
    assert "ended by itself" not in text
    saved = torch.load(tmp_path / "checkpoints" / "last-sigterm.ckpt", weights_only=True)
    assert saved["epoch"] in (2, 3)
    assert all(tensor.numel() for tensor in saved["state_dict"].values())


def test_p7_a_rank_lost_while_groups_are_made_ends_all(tmp_path: Path) -> None:
    """With two stages of two shards; other ranks wait for it in the making of a group."""
    options = {"graph_parallel": 2, "devices": 4}
    status, text, seconds = run(tmp_path, "mesh", "kill", 3, "popen", **options)
    assert status != 0
    assert "ended by itself" not in text
    assert re.search(LOST, text), text[-3000:]
    assert seconds < 80


@pytest.mark.parametrize("where", ["training_step", "validation_step", "F"])
@pytest.mark.parametrize(
    ("how", "rank", "start_method"),
    [("SIGTERM", 0, "popen"), ("SIGTERM", 1, "popen"), ("SIGTERM-parent", 1, "fork")],
)
def test_p7_sigterm_ends_all_ranks_at_the_end_of_the_batch_with_a_checkpoint(
    where: str, how: str, rank: int, start_method: str, tmp_path: Path
) -> None:
    _, text, _ = run(tmp_path, where, how, rank, start_method)
    assert "ended by itself" not in text
    saved = torch.load(tmp_path / "checkpoints" / "last-sigterm.ckpt", weights_only=True)
    assert saved["epoch"] in (2, 3)  # before or after the epoch is counted
    assert all(tensor.numel() for tensor in saved["state_dict"].values())
    histories = tmp_path / "checkpoints" / ".gnnpipe" / saved["gnnpipe"]["histories"]
    assert sorted(path.name for path in histories.glob("*.pt")) == ["stage_0.pt", "stage_1.pt"]


@pytest.mark.parametrize(("rank", "start_method"), [(0, "popen"), (1, "popen"), (1, "fork")])
def test_p7_sigint_ends_all_ranks(rank: int, start_method: str, tmp_path: Path) -> None:
    status, text, seconds = run(tmp_path, "training_step", "SIGINT", rank, start_method)
    assert status != 0
    assert "ended by itself" not in text
    assert seconds < 60


def is_alive(pid: int) -> bool:
    path = Path(f"/proc/{pid}/cmdline")
    deadline = time.monotonic() + 15
    while path.exists() and b"train.py" in path.read_bytes():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False

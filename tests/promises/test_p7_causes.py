"""P7: what one rank does alone, in vain, or wrongly ends all ranks soon, with that as the cause.

The timeout is ten minutes here: nothing may end by it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.promises.test_p7_no_hang import ROOT, is_alive

SCRIPT = """
import errno, os, signal, sys, time
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.saving import sidecar
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.models import GNN, NodeClassifier
from torch_geometric.data import Data

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
how, rank, start_method, folder = sys.argv[1], int(sys.argv[2]), *sys.argv[3:5]


def is_due(trainer):
    return trainer.current_epoch == 2 and trainer.global_rank == rank


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


class Module(NodeClassifier):
    def on_train_epoch_start(self):
        print(f"rank {self.trainer.global_rank} is process {os.getpid()}", flush=True)
        if how == "error while others meet" and self.trainer.current_epoch == 2:
            if is_due(self.trainer):
                time.sleep(1)
                raise KeyError("a mistake")
            torch.distributed.barrier()
        if not is_due(self.trainer):
            return
        batch = self.trainer.datamodule.data
        print("now", flush=True)
        if how == "forward":
            with torch.no_grad():
                self.net(batch.x, batch.edge_index)
        if how == "barrier":
            torch.distributed.barrier()
        if how == "gather":
            assert self.all_gather(torch.ones(3)).sum() == 3
            self.log("seen", torch.ones(1), sync_dist=True)
        if how == "exit":
            sys.exit("enough of it")
        if how == "memory":
            raise torch.OutOfMemoryError("out of memory on purpose")
        if how == "stall":
            time.sleep(300)
        if how == "no space":
            sidecar.write_stage = full
        if how == "no space on the way":
            Transport._encode = lambda *_: (_ for _ in ()).throw(
                torch.OutOfMemoryError("out of memory on purpose"))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_early = how == "return" and is_due(self.trainer)
        return torch.zeros((), requires_grad=True) if is_early else loss


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(30, 4, generator=generator),
        edge_index=torch.randint(0, 30, (2, 90), generator=generator),
        y=torch.randint(0, 3, (30,), generator=generator),
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=6, logger=False,
        callbacks=[ModelCheckpoint(folder, every_n_epochs=3)],
        enable_progress_bar=False, enable_model_summary=False,
        strategy=GNNPipeStrategy(start_method=start_method),
    )
    trainer.fit(Module(GNN(4, 8, 3, num_layers=4), 3), datamodule=FullGraphDataModule(data))
    print("ended by itself", flush=True)
"""
DIFFER = "Expected all ranks to do the same"
MEMORY = "out of memory on purpose"
CASES = [
    ("forward", 0, "fork", rf"{DIFFER} \(got rank 0 .* evaluate the pipelined module"),
    ("barrier", 0, "popen", rf"{DIFFER} \(got rank 0 .*torch.distributed.barrier \(train.py:\d+\)"),
    ("return", 1, "fork", rf"{DIFFER} \(got rank 0 wants to wait for backward data of chunk"),
    ("exit", 1, "popen", "Rank 1 failed: SystemExit: enough of it"),
    ("memory", 1, "fork", f"Rank 1 failed: OutOfMemoryError: {MEMORY}"),
    ("no space", 1, "fork", "Rank 1 failed: .*No space left on device"),
    ("no space on the way", 0, "fork", f"Rank 0 failed: OutOfMemoryError: {MEMORY}"),
    ("error while others meet", 1, "popen", "Rank 1 failed: KeyError: 'a mistake'"),
]


def start(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments), str(tmp_path / "checkpoints")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str], before: str = "") -> tuple[str, float]:
    """Return what the script has printed, and how many seconds it took to end."""
    started = time.monotonic()
    timer = threading.Timer(60, lambda: [kill(int(pid)) for pid in processes(before)])
    timer.start()
    text = before + process.communicate()[0]
    timer.cancel()
    seconds = time.monotonic() - started
    assert not any(map(is_alive, processes(text)))
    return text, seconds


def processes(text: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"is process (\d+)", text)]


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("how", "rank", "start_method", "cause"), CASES)
def test_p7_what_one_rank_does_ends_all_with_that_cause(
    how: str, rank: int, start_method: str, cause: str, tmp_path: Path
) -> None:
    process = start(tmp_path, how, rank, start_method)
    assert process.stdout is not None
    text = ""
    while "now" not in text and (line := process.stdout.readline()):
        text += line
    text, seconds = finish(process, text)
    assert process.returncode != 0
    assert "ended by itself" not in text
    assert re.search(cause, text), text[-3000:]
    assert seconds < 30


def test_p7_what_needs_no_other_rank_may_be_done_by_one(tmp_path: Path) -> None:
    process = start(tmp_path, "gather", 1, "fork")
    text, _ = finish(process)
    assert process.returncode == 0, text[-3000:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_p7_a_rank_that_waits_obeys_signals(number: signal.Signals, tmp_path: Path) -> None:
    """Rank 1 sleeps, and rank 0 waits for it."""
    process = start(tmp_path, "stall", 1, "popen")
    assert process.stdout is not None
    text = ""
    while "now" not in text and (line := process.stdout.readline()):
        text += line
    time.sleep(2)
    os.kill(process.pid, number)
    text, seconds = finish(process, text)
    assert process.returncode != 0
    assert seconds < 30

"""P7: what one rank does alone, in vain, or wrongly ends all ranks soon, with that as the cause.

The timeout is ten minutes here: nothing may end by it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.cases import slow
from tests.helpers.scripts import Script, is_alive, start_script

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
DIFFER = "Expected all ranks to make the same calls"
MEMORY = "out of memory on purpose"
CASES = [
    ("forward", 0, "fork", rf"{DIFFER} \(got rank 0 .* evaluate the pipelined module"),
    slow(
        "barrier",
        0,
        "popen",
        rf"{DIFFER} \(got rank 0 .*torch.distributed.barrier \(train.py:\d+\)",
    ),
    ("return", 1, "fork", rf"{DIFFER} \(got rank 0 wants to wait for backward data of chunk"),
    ("exit", 1, "popen", "Rank 1 failed: SystemExit: enough of it"),
    ("memory", 1, "fork", f"Rank 1 failed: OutOfMemoryError: {MEMORY}"),
    ("no space", 1, "fork", "Rank 1 failed: .*No space left on device"),
    ("no space on the way", 0, "fork", f"Rank 0 failed: OutOfMemoryError: {MEMORY}"),
    ("error while others meet", 1, "popen", "Rank 1 failed: KeyError: 'a mistake'"),
]


def start(tmp_path: Path, *arguments: object) -> Script:
    """Start the script, as a fork: with popen only the other rank is a new process.

    A barrier that a forked rank enters alone ends otherwise: no rank says who made which call.
    """
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    is_new = arguments[0] == "barrier"
    return start_script(path, *arguments, tmp_path / "checkpoints", is_new=is_new)


def end(script: Script) -> float:
    """Wait for its end, with no process left; return how many seconds that took."""
    seconds = script.end(60)
    for pid in re.findall(r"is process (\d+)", script.text):
        assert not is_alive(int(pid)), f"process {pid} is left over"
    return seconds


@pytest.mark.parametrize(("how", "rank", "start_method", "cause"), CASES)
def test_p7_what_one_rank_does_ends_all_with_that_cause(
    how: str, rank: int, start_method: str, cause: str, tmp_path: Path
) -> None:
    script = start(tmp_path, how, rank, start_method)
    script.wait_for("now")
    assert end(script) < 30
    assert script.returncode != 0
    assert "ended by itself" not in script.text
    assert re.search(cause, script.text), script.text[-3000:]


def test_p7_what_needs_no_other_rank_may_be_done_by_one(tmp_path: Path) -> None:
    script = start(tmp_path, "gather", 1, "fork")
    end(script)
    assert script.returncode == 0, script.text[-3000:]


@pytest.mark.parametrize(
    ("number", "start_method"),
    [
        slow(signal.SIGTERM, "popen"),
        (signal.SIGINT, "fork"),
        slow(signal.SIGINT, "popen"),
    ],
)
def test_p7_a_rank_that_waits_obeys_signals(
    number: signal.Signals, start_method: str, tmp_path: Path
) -> None:
    """Rank 1 sleeps, and rank 0 waits for it."""
    script = start(tmp_path, "stall", 1, start_method)
    script.wait_for("now")
    time.sleep(1)  # until rank 0 waits
    os.kill(script.pid, number)
    assert end(script) < 30
    assert script.returncode != 0

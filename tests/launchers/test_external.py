"""Processes that others start: torchrun with restarts, SLURM's tasks, its requeue signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.trainer.signals import REQUEUE, StopSignals
from tests.helpers.scripts import ROOT, run_script

SCRIPT = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.helpers.observed import fit, make_module

folder, how = Path(sys.argv[1]), sys.argv[2]


class Fails(L.Callback):
    def on_train_batch_start(self, trainer, *_):
        epoch, rank, marker = trainer.current_epoch, trainer.global_rank, folder / "killed"
        if (how, epoch, rank) == ("kill", 5, 1) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if (how, epoch, rank) == ("requeue", 3, 0):
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_train_start(self, trainer, *_):
        print(f"rank {trainer.global_rank} begins at epoch {trainer.current_epoch}", flush=True)


module, saver = make_module(0.1), ModelCheckpoint(folder / "checkpoints", save_last=True)
trainer = fit(
    2, saver, Fails(), module=module, max_epochs=12, num_nodes=1, default_root_dir=folder,
    enable_checkpointing=True, ckpt_path="last", start_method="popen",
    strategy={"timeout": timedelta(seconds=20)},
)
total = sum(p.sum().item() for p in module.parameters())
states = trainer.optimizers[0].state_dict()["state"].values()
total += sum(state["exp_avg"].sum().item() for state in states)
print(f"rank {trainer.global_rank} ends with {total:.12f}", flush=True)
"""

AGENT = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank(*argv):
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=2, run_id="test",
    rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
)
elastic_launch(config, rank)(*sys.argv[1:])
"""
"""What torchrun does, but that its agent forks the ranks: they need not import anything."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a new program."""
    path = os.environ.get("PATH", "")
    return {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def ends(text: str) -> set[str]:
    return set(re.findall(r"ends with (-?\d+\.\d{12})", text))


def train(folder: Path, is_new: bool = False) -> str:
    folder.mkdir(exist_ok=True)
    return run_script(folder, SCRIPT, folder, "none", is_new=is_new).text


def torchrun(folder: Path, how: str) -> str:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return run_script(folder, AGENT, script, folder, how).text


def test_p6_torchrun_restarts_a_run_that_goes_on_by_itself(tmp_path: Path) -> None:
    """One rank is killed in epoch 5; the weights are those of a run that nobody disturbed."""
    whole, again = train(tmp_path / "whole"), torchrun(tmp_path / "again", "kill")
    assert "begins at epoch 5" in again and "begins at epoch 5" not in whole
    assert len(ends(whole)) == 1
    assert ends(again) == ends(whole)


def run_slurm(folder: Path, how: str) -> list[str]:
    """Start two tasks as `srun` would; return what they print."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    shared = environment(
        PATH=f"{folder}:{os.environ.get('PATH', '')}",
        SLURM_JOB_ID="77",
        SLURM_JOB_NAME="train",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_NODEID="0",
        SLURM_NODELIST="localhost",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
        )
        for rank in "01"
    ]
    try:
        return [task.communicate(timeout=100)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()


@pytest.mark.slow  # torchrun stands for launchers that start ranks, in the test above
def test_slurm_starts_the_ranks_and_queues_the_job_again(tmp_path: Path) -> None:
    """SIGUSR1 in a step: both ranks save between steps; `scontrol requeue` is called once."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/queued\n')
    scontrol.chmod(0o755)
    texts = run_slurm(tmp_path, "requeue")
    assert [len(ends(text)) for text in texts] == [1, 1], texts[0][-3000:]
    assert (tmp_path / "queued").read_text() == "requeue 77\n"
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_file()


@pytest.mark.slow
def test_torchrun_that_is_to_stop_saves_and_goes_on(tmp_path: Path) -> None:
    """The agent passes SIGTERM on to all ranks."""
    whole, folder = torchrun(tmp_path / "whole", "none"), tmp_path / "stopped"
    script = tmp_path / "whole" / "script.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", str(script), str(folder), "none"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as one:
        deadline = time.monotonic() + 60
        while not list(folder.glob("checkpoints/*.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.01)
        one.send_signal(signal.SIGTERM)
        one.communicate(timeout=60)
    folder.rename(tmp_path / "moved")
    assert ends(train(tmp_path / "moved", is_new=True)) == ends(whole)


def test_a_rank_that_does_not_handle_the_requeue_signal_says_so() -> None:
    signals = StopSignals()
    signals.agree([0, REQUEUE], L.Trainer(logger=False))
    with pytest.raises(ConfigError, match=r"every rank \(got a rank without.* main thread of"):
        signals.requeue()

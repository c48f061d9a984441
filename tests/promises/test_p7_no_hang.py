"""P7: a rank that raises, is killed, stalls or gets a signal ends all ranks, with the cause.

So does what one rank does alone or wrongly.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cases import slow
from tests.helpers.scripts import Script, is_alive, start_script

SCRIPT = """
import errno, os, signal, sys, time
from datetime import timedelta

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_gnnpipe.comm.transport as transport
from lightning_gnnpipe.chunks import Step
from lightning_gnnpipe.trainer import checkpoints
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.models import GIN, GraphClassifier, NodeClassifier
from torch.multiprocessing import ProcessContext
from torch_geometric.loader import DataLoader
from tests.helpers.observed import NUM_FEATURES, make_data, make_module
from tests.helpers.trainers import quiet_trainer

torch.set_num_threads(1)
join = getattr(ProcessContext, "_join_procs_with_timeout", None)
if join is not None and sys.argv[1] != "epoch_start":  # it kills what ignores SIGTERM, after 30 s
    ProcessContext._join_procs_with_timeout = lambda self, seconds: join(self, min(seconds, 1))
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
where, how, rank, start_method, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:6]
options = eval(sys.argv[6])
devices, seconds = options.pop("devices", 2), options.pop("timeout", 8)
epochs = options.pop("epochs", 50)
current = None


def is_due():
    return current is not None and (where == "mesh" or (
        current.current_epoch == 2 and not current.sanity_checking))


def throw(error):
    raise error


def gather():
    assert current.lightning_module.all_gather(torch.ones(3)).sum() == 3
    current.lightning_module.log("seen", torch.ones(1), sync_dist=True)


class Nameless(Exception):
    def __str__(self):
        raise ValueError("no words for it")


MISTAKE = KeyError("the user's mistake")
MEMORY = torch.OutOfMemoryError("out of memory on purpose")
FULL = OSError(errno.ENOSPC, "No space left on device")
WAYS = {  # and names of signals
    "raise": lambda: throw(MISTAKE),
    "raise while others meet": lambda: (time.sleep(1), throw(MISTAKE)),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit("enough of it"),
    "stall": lambda: time.sleep(300),
    "memory": lambda: throw(MEMORY),
    "nameless": lambda: throw(Nameless()),
    "no space": lambda: setattr(checkpoints, "write_histories", lambda *_: throw(FULL)),
    "no space on the way": lambda: setattr(Transport, "_encode", lambda *_: throw(MEMORY)),
    "forward": torch.no_grad()(
        lambda: current.lightning_module.net(data.data.x, data.data.edge_index)),
    "gather": gather,
    "return": lambda: None,
    **dict.fromkeys(("stop", "stop late"), lambda: setattr(current, "should_stop", True)),
}


def fail(place):
    if place == where and is_due() and current.global_rank == rank:
        print("now", flush=True)
        WAYS[how]() if how in WAYS else os.kill(os.getpid(), getattr(signal, how))


def failing(name, work):
    def run(*args, **kwargs):
        fail(name)
        return work(*args, **kwargs)
    return run


def failing_in_phase(name, work):
    def run(step, phase, *args):
        fail(f"{name} {phase}")
        return work(step, phase, *args)
    return run


Step._compute = failing("F", Step._compute)
Step._differentiate = failing("B", Step._differentiate)
Step._send = failing_in_phase("send", Step._send)
Step._receive = failing_in_phase("receive", Step._receive)
checkpoints.write_histories = failing("save", checkpoints.write_histories)
Transport.exchange = failing("exchange", Transport.exchange)
Transport.sum_over_shards = failing("average", Transport.sum_over_shards)
transport.make_axes = failing("mesh", transport.make_axes)


class Fails:
    def on_train_epoch_start(self):
        if how == "raise while others meet" and is_due() and self.trainer.global_rank != rank:
            torch.distributed.barrier()
        fail("epoch_start")

    def training_step(self, batch, batch_idx):
        fail("training_step")
        loss = super().training_step(batch, batch_idx)
        is_early = how == "return" and is_due() and self.trainer.global_rank == rank
        return torch.zeros((), requires_grad=True) if is_early else loss

    def validation_step(self, batch, batch_idx):
        fail("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self):
        print(f"rank {self.trainer.global_rank} is process {os.getpid()}", flush=True)
        fail("epoch_end")


class OfNodes(Fails, NodeClassifier): ...


class OfGraphs(Fails, GraphClassifier): ...


class Watches(L.Callback):
    def on_train_batch_end(self, *_):
        fail("callback")


if __name__ == "__main__":
    data = make_data()
    saves = where == "save" or how == "no space"
    saver = ModelCheckpoint(folder, every_n_epochs=3 if saves else 1000)
    strategy = {"start_method": start_method, "timeout": timedelta(seconds=seconds), **options}
    saving = {"callbacks": [Watches(), saver], "enable_checkpointing": True}
    trainer = current = quiet_trainer(devices, strategy, max_epochs=epochs, **saving)
    if "data_parallel" in options:
        data.data.y = data.data.y[:1]
        graphs = DataLoader([data.data] * 12, batch_size=3)
        net = GIN(NUM_FEATURES, 8, 3, num_layers=4)
        trainer.fit(OfGraphs(net, 3), graphs, graphs)
    else:
        trainer.fit(OfNodes(make_module().net, 3), datamodule=data)
    print("ended by itself", flush=True)
"""

MISTAKE = "the user's mistake"
LOST = "another rank failed|SIGKILL|exit code|terminated with code -9"
SHARDS: dict[str, Any] = {"graph_parallel": 2, "halo_codec": "int1"}
HYBRID: dict[str, Any] = {"data_parallel": 2, "num_chunks": 3, "devices": 4}
"""Two replicas of two stages, on batches of graphs."""
RANK_OF = {
    **{"F": 0, "send forward": 0, "receive forward": 1},
    **{"B": 1, "send backward": 1, "receive backward": 0},
}
OPERATIONS = [(op, how, rank) for op, rank in RANK_OF.items() for how in ("raise", "kill")]

CASES: list[Any] = [
    slow("training_step", "raise", 0, "popen", {}),
    ("training_step", "kill", 1, "popen", {}),
    ("training_step", "raise", 1, "fork", {}),
    ("training_step", "kill", 0, "fork", {}),
    ("training_step", "stall", 1, "fork", {}),
    slow("validation_step", "raise", 1, "fork", {}),
    ("validation_step", "kill", 1, "fork", {}),
    slow("callback", "raise", 0, "fork", {}),
    ("callback", "kill", 1, "fork", {}),
    ("save", "raise", 1, "fork", {}),
    slow("save", "kill", 0, "fork", {}),
    slow("save", "stall", 1, "fork", {}),
    *(
        (slow if turn % 4 in (1, 2) else pytest.param)(*way, "fork", {})
        for turn, way in enumerate(OPERATIONS)
    ),
    ("exchange", "raise", 0, "fork", SHARDS),
    ("callback", "raise", 0, "popen", {**SHARDS, "async_halo": True}),
    ("exchange", "kill", 1, "fork", SHARDS),
    ("exchange", "kill", 0, "fork", {**SHARDS, "async_halo": True}),
    ("exchange", "stall", 1, "fork", {**SHARDS, "async_halo": True}),
    slow("training_step", "raise", 2, "fork", HYBRID),
    ("validation_step", "kill", 3, "fork", HYBRID),
    slow("B", "kill", 3, "fork", HYBRID),
    slow("F", "stall", 1, "fork", HYBRID),
    ("average", "kill", 2, "fork", HYBRID),
    # Other ranks wait for it in the making of a group.
    ("mesh", "kill", 3, "fork", {"graph_parallel": 2, "devices": 4}),
]


def run(
    tmp_path: Path,
    where: str,
    how: str,
    rank: int,
    start_method: str,
    number: signal.Signals | None = None,
    **options: Any,
) -> Script:
    """Run the script to its end, of which no process may be left.

    In the third epoch, `rank` fails at `where` in the way `how`; then the script gets `number`.
    With popen only the other ranks have a new Python, since the script is a fork; but it has its
    own where it sends itself a signal.
    """
    path, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    path.write_text(SCRIPT)
    words = where, how, rank, start_method, folder, options
    is_new = start_method == "popen" and how.startswith("SIG")
    script = start_script(path, *words, is_new=is_new)
    script.wait_for("now")
    if number is not None:
        time.sleep(1)  # until the other rank waits
        os.kill(script.pid, number)
    script.end(30 if where == "epoch_start" else 60)
    for pid in re.findall(r"is process (\d+)", script.text):
        assert not is_alive(int(pid)), f"process {pid} is left over"
    goes_on = how in ("gather", "forward", "stop")
    assert ("ended by itself" in script.text) == goes_on, script.text[-3000:]
    assert how.startswith("SIGTERM") or (script.returncode == 0) == goes_on
    return script


@pytest.mark.some_cases(6)
@pytest.mark.parametrize(("where", "how", "rank", "start_method", "options"), CASES)
def test_p7_all_ranks_end_with_the_cause(
    where: str, how: str, rank: int, start_method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if how == "stall":
        options = {**options, "timeout": 2}
    script = run(tmp_path, where, how, rank, start_method, **options)
    killed = LOST if start_method == "popen" or where == "mesh" else "SIGKILL"
    cause = {"raise": MISTAKE, "kill": killed, "stall": "did not answer within 2 s"}[how]
    assert re.search(cause, script.text), script.text[-3000:]
    hidden = rf"{MISTAKE}\"\s+(\[rank\d\]:\s+)?During handling of the above"
    assert not re.search(hidden, script.text), script.text[-3000:]


MEMORY = "out of memory on purpose"


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("how", "rank", "start_method", "timeout", "cause"),
    [
        ("return", 1, "fork", 2, "did not answer within 2 s"),
        # Nothing may end by a timeout of ten minutes.
        ("exit", 1, "popen", 600, "Rank 1 failed: SystemExit: enough of it"),
        ("memory", 1, "fork", 600, f"Rank 1 failed: OutOfMemoryError: {MEMORY}"),
        ("nameless", 1, "fork", 600, "Rank 1 failed: Nameless"),
        ("no space", 1, "fork", 600, "Rank 1 failed: .*No space left on device"),
        ("no space on the way", 0, "fork", 600, f"Rank 0 failed: OutOfMemoryError: {MEMORY}"),
        ("raise while others meet", 1, "popen", 600, f"Rank 1 failed: KeyError: .{MISTAKE}"),
        ("forward", 0, "fork", 600, ""),  # which need no other rank
        ("gather", 1, "fork", 600, ""),
        ("stop", 0, "fork", 600, ""),
        ("stop late", 0, "fork", 600, "rank 0 wants to stop early; rank 1 wants to begin a step"),
    ],
)
def test_p7_what_one_rank_does_ends_all_with_that_cause(
    how: str, rank: int, start_method: str, timeout: int, cause: str, tmp_path: Path
) -> None:
    places = {"return": "training_step", "stop": "callback", "stop late": "epoch_end"}
    where = places.get(how, "epoch_start")
    script = run(tmp_path, where, how, rank, start_method, timeout=timeout, epochs=6)
    assert re.search(cause, script.text), script.text[-3000:]
    if how == "stop":  # both after the third epoch
        assert script.text.count("is process") == 6


@pytest.mark.parametrize(("number", "timeout"), [(signal.SIGINT, 600), slow(signal.SIGTERM, 5)])
def test_p7_a_rank_that_waits_obeys_signals(
    number: signal.Signals, timeout: int, tmp_path: Path
) -> None:
    """Rank 1 sleeps, and rank 0 waits for it."""
    run(tmp_path, "epoch_start", "stall", 1, "fork", number, timeout=timeout)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("where", "how", "rank", "start_method", "options"),
    [
        ("training_step", "SIGTERM", 0, "popen", {}),
        slow("validation_step", "SIGTERM", 1, "popen", {}),
        ("training_step", "SIGTERM", 0, "fork", {}),
        ("F", "SIGTERM", 1, "fork", {}),
        ("training_step", "SIGTERM", 3, "fork", HYBRID),
    ],
)
def test_p7_sigterm_ends_all_ranks_at_the_end_of_the_batch_with_a_checkpoint(
    where: str, how: str, rank: int, start_method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    run(tmp_path, where, how, rank, start_method, **options)
    saved = torch.load(tmp_path / "checkpoints" / "last-sigterm.ckpt", weights_only=True)
    assert saved["epoch"] in (2, 3)  # before or after the epoch is counted
    assert all(tensor.numel() for tensor in saved["state_dict"].values())
    if not options:
        histories = tmp_path / "checkpoints" / ".gnnpipe" / saved["gnnpipe"]["histories"]
        assert sorted(path.name for path in histories.glob("*.pt")) == ["stage_0.pt", "stage_1.pt"]


@pytest.mark.parametrize(
    ("rank", "start_method"), [slow(0, "popen"), slow(1, "popen"), (0, "fork"), (1, "fork")]
)
def test_p7_sigint_ends_all_ranks(rank: int, start_method: str, tmp_path: Path) -> None:
    run(tmp_path, "training_step", "SIGINT", rank, start_method)

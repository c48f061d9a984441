"""A run leaves the process as it was, also one that an error ends, and does not grow with time."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
import torch_geometric.nn as gnn
import torch_geometric.utils
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch_geometric.data import Data
from torch_geometric.nn.conv import gcn_conv, han_conv

from lightning_gnnpipe import FullGraphDataModule, StalenessMonitor, StalenessWarmup
from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.models import GCNII, NodeClassifier
from tests.helpers.observed import NUM_CLASSES, make_data, make_module, make_trainer

MODULES = (torch, torch.distributed, torch_geometric.utils, gnn, gcn_conv, han_conv)
CLASSES = (torch.Tensor, torch.nn.Module, torch.nn.Linear, gnn.MessagePassing, gnn.GCNConv)


def process_state(trainer: L.Trainer) -> dict[str, Any]:
    connector: Any = trainer._accelerator_connector
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    loggers = ("", "lightning", "lightning.pytorch", "torch", "lightning_gnnpipe")
    state = {
        "warnings": list(warnings.filters),
        "show": warnings.showwarning,
        "signals": {one: signal.getsignal(one) for one in signal.valid_signals()},
        "wakeup": fd,
        "environment": dict(os.environ),
        "hooks": (sys.excepthook, sys.displayhook, threading.excepthook),
        "levels": {one: (logging.getLogger(one).level, logging.raiseExceptions) for one in loggers},
        "threads": {one.name for one in threading.enumerate()} - {"tqdm_monitor"},
        "torch": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.distributed.is_initialized(),
        ),
        "samplers": connector.use_distributed_sampler,
        "aggregation": gnn.Aggregation.__call__,
    }
    for owner in (*MODULES, *CLASSES):
        own = {name: id(value) for name, value in vars(owner).items() if callable(value)}
        state[f"names of {owner.__name__}"] = own
    return state


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_the_process_as_it_was(fails: bool) -> None:
    class Module(NodeClassifier):
        def training_step(self, *args: Any) -> Any:
            loss = super().training_step(*args)
            if fails and self.current_epoch == 1:
                raise KeyError("a mistake")
            return loss

        def on_train_start(self) -> None:
            warnings.filterwarnings("ignore", message="what the user ignores")

    trainer, module, data = make_trainer(1, 3), Module(make_module().net, NUM_CLASSES), make_data()
    before = process_state(trainer)
    if fails:
        with pytest.raises(KeyError, match="a mistake"):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data)
        trainer.validate(module, data, verbose=False)
    after = process_state(trainer)
    assert after["warnings"].pop(0)[1].pattern == "what the user ignores"
    for key, value in before.items():
        assert after[key] == value, key


def test_the_module_is_given_back_also_if_the_end_of_the_run_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(engine: PipelineEngine) -> None:
        raise RuntimeError("CUDA error: device-side assert")

    module = make_module()
    monkeypatch.setattr(PipelineEngine, "run_state", fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        make_trainer(1, 3).fit(module, make_data())
    assert "forward" not in vars(module.net)


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
def test_two_hundred_epochs_leave_nothing(num_stages: int, recompute: bool, tmp_path: Path) -> None:
    """With all there is: no growth of memory, file handles or threads."""
    trainer = make_trainer(
        num_stages,
        6,
        *(StalenessWarmup(num_epochs=3), StalenessMonitor(), Watch(tmp_path)),
        ModelCheckpoint(tmp_path, every_n_epochs=10),
        strategy={"recompute": recompute, "staleness": "gnnpipe"},
        max_epochs=LAST,
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    torch.manual_seed(0)
    data = Data(x=torch.randn(400, 8), edge_index=torch.randint(400, (2, 2000)))
    data.y = torch.randint(3, (400,))
    net = GCNII(8, 16, 3, num_layers=6, dropout=0.2)
    trainer.fit(NodeClassifier(net, 3), FullGraphDataModule(data))
    for rank in range(num_stages):
        warm, last = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        for name in ("files", "threads", "tensors"):
            assert last[name] <= warm[name], (rank, name, warm, last)
        assert last["rss"] - warm["rss"] < 12 * MIB, (rank, warm, last)

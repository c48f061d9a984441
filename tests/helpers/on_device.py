"""A pytest plugin: Trainers of a test that ask for the CPU train on `GNNPIPE_DEVICE`.

    GNNPIPE_DEVICE=cuda pytest -p tests.helpers.on_device tests/promises/test_p1_transparency.py

With `GNNPIPE_CUDA_GRAPHS=1` the strategy has `cuda_graphs=True` where its other options allow it.

Tests fork their ranks. CUDA does not survive a fork, so this process must not begin to use it: a
fit on one rank and the oracle, whose backward would, get processes of their own, and files are
loaded to the CPU. PyG's import, which reads how torch was built, and MPI, which Lightning looks
for, would begin to use it, too. Ranks share one GPU.
"""

# ruff: noqa: E402

from __future__ import annotations

import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

torch.__config__.show = lambda: ""
import lightning as L
import pytest
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import MixedPrecision

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError
from tests.helpers import training
from tests.helpers.cuda_graphs import cuda_graphs
from tests.helpers.device import DEVICE

_oracle = training.train_with_oracle
_init, _fit, _load = L.Trainer.__init__, L.Trainer.fit, torch.load
_strategy = GNNPipeStrategy.__init__


class OneCard(CUDAAccelerator):
    """Puts all ranks on the first GPU; Lightning's own refuses more ranks than GPUs."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices if isinstance(devices, int) else 1))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]


def _made(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
    if DEVICE.type == "cuda" and kwargs.get("accelerator") == "cpu":
        kwargs["accelerator"] = OneCard()
        for one in kwargs.get("plugins") or ():
            if isinstance(one, MixedPrecision) and one.scaler is not None:
                state = one.scaler.state_dict()
                one.device, one.scaler = "cuda", torch.amp.GradScaler("cuda")
                one.scaler.load_state_dict(state)
    _init(self, *args, **kwargs)


def _fitted(self: L.Trainer, model: L.LightningModule, *args: Any, **kwargs: Any) -> None:
    if self.num_devices > 1:
        _fit(self, model, *args, **kwargs)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fitted.pt"

        def work() -> None:
            _fit(self, model, *args, **kwargs)
            found = {"state": model.state_dict(), "metrics": dict(self.callback_metrics)}
            torch.save(found, path)

        _in_a_process(work)
        found = torch.load(path)
        model.load_state_dict(found["state"])
        self._logger_connector._callback_metrics.update(found["metrics"])


def _trained(module: L.LightningModule, *args: Any, **kwargs: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trained.pt"

        def work() -> None:
            steps = _oracle(module, *args, **kwargs)  # type: ignore[arg-type]
            torch.save((steps, module.state_dict()), path)

        _in_a_process(work)
        steps, state = torch.load(path, weights_only=False)
        module.load_state_dict(state)
        return list(steps)


def _captured(self: GNNPipeStrategy, **options: Any) -> None:
    try:
        _strategy(self, **{"cuda_graphs": True, **options})
    except ConfigError:
        _strategy(self, **options)


def _in_a_process(work: Callable[[], None]) -> None:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"The process of the fit ended with {os.waitstatus_to_exitcode(status)}")


if os.environ.get("GNNPIPE_CUDA_GRAPHS"):
    GNNPipeStrategy.__init__ = functools.wraps(_strategy)(_captured)  # type: ignore[method-assign]

    @pytest.fixture(autouse=True)
    def graphs() -> Iterator[None]:
        """Have CUDA graphs in each test, simulated ones on the CPU."""
        with cuda_graphs():
            yield


L.Trainer.__init__ = functools.wraps(_init)(_made)  # type: ignore[method-assign]
L.Trainer.fit = functools.wraps(_fit)(_fitted)  # type: ignore[method-assign]
training.train_with_oracle = _trained
sys.modules["mpi4py"] = None  # type: ignore[assignment]
torch.load = functools.partial(_load, map_location="cpu")

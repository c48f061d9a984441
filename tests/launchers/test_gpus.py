"""What differs for processes with GPUs: forks that cannot use them, ranks that die slowly."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe._compat_torch import has_begun_cuda
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.trainer import processes
from lightning_gnnpipe.trainer._compat_launcher import WorkerLauncher

CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:36571"


@pytest.mark.parametrize(
    ("device", "has_begun", "is_refused"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_forks_of_a_process_that_uses_cuda_are_refused(
    device: str, has_begun: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "has_begun_cuda", lambda: has_begun)
    strategy = GNNPipeStrategy(start_method="fork")
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device(device, number) for number in range(2)]
    if is_refused:
        with pytest.raises(ConfigError, match="import of torch_geometric"):
            strategy._configure_launcher()
    else:
        strategy._configure_launcher()
        assert isinstance(strategy.launcher, WorkerLauncher)


def test_a_cpu_has_not_begun_cuda() -> None:
    assert torch.cuda.is_available() or not has_begun_cuda()


@pytest.mark.parametrize(
    ("text", "codes", "cause"),
    [
        (f"{CLOSED} errors.PeerError: rank 0", [1, -signal.SIGKILL], "process 1 .* SIGKILL"),
        (f"{CLOSED} errors.PeerError: rank 0", [1, -40], "process 1 .* signal 40"),
        (f"{CLOSED} errors.PeerError: rank 0", [1, -signal.SIGTERM], "PeerError"),
        ("did not answer. errors.PeerError: rank 0", [1, -signal.SIGKILL], "PeerError"),
        (f"{CLOSED} ValueError: wrong", [1, -signal.SIGKILL], "ValueError"),
    ],
)
def test_a_killed_rank_is_the_cause_though_another_one_reports_first(
    text: str, codes: list[int], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(self: Any, *_: Any, **__: Any) -> None:
        self.procs = [SimpleNamespace(exitcode=code, pid=7) for code in codes]
        raise ProcessRaisedException(text, 0, 7)

    monkeypatch.setattr(WorkerLauncher.__base__, "launch", launch)
    strategy = GNNPipeStrategy(start_method="fork")
    launcher = WorkerLauncher(strategy, start_method="fork")
    with pytest.raises((ProcessRaisedException, ProcessExitedException), match=cause):
        launcher.launch(lambda: None)

"""Forks that would use a GPU are refused."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.trainer.processes import ForkLauncher


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_forks_that_would_use_a_gpu_are_refused(device: str) -> None:
    strategy = GNNPipeStrategy(start_method="fork")
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device(device, number) for number in range(2)]
    if device == "cuda":
        with pytest.raises(ConfigError, match="import of torch_geometric"):
            strategy._configure_launcher()
    else:
        strategy._configure_launcher()
        assert isinstance(strategy.launcher, ForkLauncher)

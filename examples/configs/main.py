"""Trains, tests or predicts what a config names: python main.py fit --config own_net.yaml."""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

import lightning_gnnpipe.models  # noqa: F401 (so that configs may name its classes)

if __name__ == "__main__":
    LightningCLI(save_config_kwargs={"overwrite": True})

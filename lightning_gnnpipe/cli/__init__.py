"""The command line: train, evaluate and predict as LightningCLI does, and `plan`."""

from __future__ import annotations

from lightning_gnnpipe.cli.commands import main

__all__ = ["main"]

"""The command line: the commands of LightningCLI, and `plan`."""

from __future__ import annotations

from lightning_gnnpipe.cli.commands import main

__all__ = ["main"]

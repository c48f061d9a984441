"""Checkpoint files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a local checkpoint to a file beside it, which then takes its place in one move.

    Whenever a save is cut off, the last checkpoint of that name is still there. Remote paths are
    written as Lightning does.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None
    ) -> None:
        target = local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        with open(part, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)


def local_path(path: _PATH) -> Path | None:
    """Return `path` as a local one; None if it is remote."""
    text = str(path)
    if "://" not in text:
        return Path(text)
    return Path(text.removeprefix("file://")) if text.startswith("file://") else None

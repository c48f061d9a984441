"""Atomic checkpoint files: whole or absent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_gnnpipe.trainer._compat import PathLike, load_file

TRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""torch's environment variable by which a user trusts all files."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a local checkpoint to a temporary file, and moves it to its name.

    An interrupted save leaves the last checkpoint intact. Remote paths are written by Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
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

    def load_checkpoint(
        self, path: PathLike, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint; with `weights_only` refuse all but tensors and plain types.

        torch before 2.6, and Lightning before 2.6, would run any code in the file.
        """
        if not get_filesystem(path).exists(str(path)):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        found: dict[str, Any] = load_file(path, map_location, holds_plain_types(weights_only))
        return found


def holds_plain_types(weights_only: bool | None) -> bool:
    """Whether to load only tensors and plain types; None reads the environment."""
    if weights_only is not None:
        return weights_only
    return os.environ.get(TRUST, "0").lower() not in ("1", "y", "yes", "true")


def local_path(path: PathLike) -> Path | None:
    """Return `path` as a local path; None if it is remote."""
    text = str(path)
    if "://" not in text:
        return Path(text)
    return Path(text.removeprefix("file://")) if text.startswith("file://") else None

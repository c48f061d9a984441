"""Checkpoint files: histories beside a checkpoint, and checkpoints as sharded folders."""

from __future__ import annotations

from lightning_gnnpipe.saving.shards import load_shards

__all__ = [
    "load_shards",
]

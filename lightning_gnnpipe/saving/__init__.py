"""Checkpoints in files: whole or not there, histories beside them, one file or many."""

from __future__ import annotations

from lightning_gnnpipe.saving.shards import load_shards

__all__ = [
    "load_shards",
]

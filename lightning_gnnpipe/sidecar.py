"""Histories beside a checkpoint, in files that plain Lightning does not look at.

    folder/last.ckpt                         names the id of its histories
    folder/.gnnpipe/<id>/stage_0.pt ...      written first, by each rank its own
                         checkpoint          name of the checkpoint they belong to

A folder becomes visible under its id when all ranks have written, and the checkpoint that names it
replaces the last one in one move: whenever a save is cut off, a whole checkpoint is left.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_gnnpipe.errors import CheckpointError, explain

_FOLDER = ".gnnpipe"
_OWNER = "checkpoint"
_PART = ".part"
_ABANDONED_S = 3600.0


def new_id() -> str:
    """Return a name for the histories of one checkpoint."""
    return uuid.uuid4().hex[:16]


def histories_folder(checkpoint: Path, ident: str) -> Path:
    """Return where the histories of `checkpoint` are; a link to a checkpoint has its target's."""
    return checkpoint.resolve().parent / _FOLDER / ident


def unfinished_folder(checkpoint: Path, ident: str) -> Path:
    """Return where they are written."""
    return checkpoint.parent / _FOLDER / (ident + _PART)


def write_stage(folder: Path, stage: int, saved: Mapping[Any, Any]) -> None:
    """Write what one rank has saved."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"stage_{stage}.pt", "wb") as file:
        torch.save(dict(saved), file)
        file.flush()
        os.fsync(file.fileno())


def finish(checkpoint: Path, ident: str) -> None:
    """Make what all ranks have written visible."""
    folder = unfinished_folder(checkpoint, ident)
    (folder / _OWNER).write_text(checkpoint.name)
    folder.rename(folder.with_name(ident))


def prune(checkpoint: Path, keep: str | None, *, keeps_last: bool = False) -> None:
    """Delete the histories of earlier checkpoints of this name, and what was never finished.

    Args:
        checkpoint: The checkpoint.
        keep: The id of its own; None if it has none.
        keeps_last: Keep those of the one before as well: the file may be written later.
    """
    folder = checkpoint.parent / _FOLDER
    newest_first = sorted(folder.glob("*"), key=_age) if folder.is_dir() else []
    for one in newest_first:
        owner = one / _OWNER
        if one.name == keep:
            continue
        if keeps_last and owner.is_file() and owner.read_text() == checkpoint.name:
            keeps_last = False
            continue
        is_old = owner.is_file() and owner.read_text() == checkpoint.name
        is_left = one.name.endswith(_PART) and time.time() - one.stat().st_mtime > _ABANDONED_S
        if is_old or is_left:  # another run may be writing to the same folder
            shutil.rmtree(one, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except FileNotFoundError:  # another run has deleted it
        return 0.0


def read_stages(folder: Path, num_stages: int) -> tuple[dict[Any, Any], ...]:
    """Return what each rank has saved, mapped into memory; nothing if there is no folder.

    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    if not folder.is_dir():
        return ()
    stages = []
    for stage in range(num_stages):
        path = folder / f"stage_{stage}.pt"
        try:
            stages.append(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        except Exception as error:  # what damaged files raise is not told by torch
            raise CheckpointError(
                explain(
                    expected=f"the histories of stage {stage} of {num_stages} in {path}",
                    found=f"{type(error).__name__}: {error}",
                    remedy=f"Delete {folder} to go on without them: the first step is then exact.",
                )
            ) from error
    return tuple(stages)

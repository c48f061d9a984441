"""Histories beside a checkpoint, in files that plain Lightning does not look at.

    folder/last.ckpt                         names the id of its histories
    folder/.gnnpipe/<id>/stage_0.pt ...      written first, by each rank its own
                         checkpoint          name of the checkpoint they belong to

A folder becomes visible under its id when all ranks have written, and the checkpoint that names it
replaces the last one in one move: whenever a save is cut off, a whole checkpoint is left.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
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


def is_id(ident: object) -> bool:
    """Whether `ident` is such a name: one that a checkpoint gives is joined to a path."""
    return isinstance(ident, str) and re.fullmatch(r"[0-9a-f]{16}", ident) is not None


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
    """Make what all ranks have written on this host's file system visible."""
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
        if one.name == keep:
            continue
        is_old = _owner(one) == checkpoint.name
        if keeps_last and is_old:
            keeps_last = False
            continue
        is_left = one.name.endswith(_PART) and time.time() + _age(one) > _ABANDONED_S
        if is_old or is_left:  # another run may be writing to the same folder
            shutil.rmtree(one, ignore_errors=True)
    with suppress(OSError):  # it is not empty, or not there
        folder.rmdir()


def _age(path: Path) -> float:
    """Return a number that is the larger the older `path` is."""
    try:
        return -path.stat().st_mtime
    except OSError:  # another run has deleted it
        return -time.time()


def _owner(folder: Path) -> str:
    """Return the name of the checkpoint that histories belong to; empty where there is none."""
    try:
        return (folder / _OWNER).read_text()
    except OSError:  # not finished, or another run has deleted it
        return ""


def read_stages(folder: Path, num_stages: int) -> tuple[dict[Any, Any], ...]:
    """Return what each rank has saved, mapped into memory; nothing unless all of it is there.

    Hosts without a common file system have the files of their own ranks only.

    Raises:
        CheckpointError: If a file is damaged.
    """
    paths = [folder / f"stage_{stage}.pt" for stage in range(num_stages)]
    if not all(path.is_file() for path in paths):
        return ()
    stages = []
    for stage, path in enumerate(paths):
        try:
            stages.append(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        except Exception as error:  # torch does not say what damaged files raise
            raise CheckpointError(
                explain(
                    expected=f"the histories of stage {stage} of {num_stages} in {path}",
                    found=f"{type(error).__name__}: {error}",
                    remedy=f"Delete {folder} to go on without them: the first step is then exact.",
                )
            ) from error
    return tuple(stages)

"""Histories beside a checkpoint, in files `.gnnpipe/<id>/stage_<rank>.pt`, written before it.

The folder gets the name <id>, which the checkpoint contains, when all ranks have written. So an
interrupted save always leaves a complete checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lightning_gnnpipe.errors import CheckpointError

_FOLDER = ".gnnpipe"
_OWNER = "checkpoint"  # a file with the name of the checkpoint they belong to
_PART = ".part"
_ABANDONED_S = 3600.0


def new_id() -> str:
    """Return a new id for the histories of one checkpoint."""
    return uuid.uuid4().hex[:16]


def is_id(ident: object) -> bool:
    """Whether `ident`, read from a checkpoint, is an id, and so safe to join to a path."""
    return isinstance(ident, str) and re.fullmatch(r"[0-9a-f]{16}", ident) is not None


def histories_folder(checkpoint: Path, ident: str) -> Path:
    """Return the folder of a checkpoint's histories; links are resolved."""
    return checkpoint.resolve().parent / _FOLDER / ident


def unfinished_folder(checkpoint: Path, ident: str) -> Path:
    """Return the folder to which ranks write, before `finish` renames it."""
    return checkpoint.parent / _FOLDER / (ident + _PART)


def write_stage(folder: Path, stage: int, saved: Mapping[Any, Any]) -> None:
    """Write and sync the histories of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    write_synced(folder / f"stage_{stage}.pt", dict(saved))


def write_synced(path: Path, content: dict[Any, Any]) -> None:
    """Save `content` to a file, and wait until it is on disk."""
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def finish(checkpoint: Path, ident: str) -> None:
    """Rename the folder to its id, when all ranks on this file system have written."""
    folder = unfinished_folder(checkpoint, ident)
    (folder / _OWNER).write_text(checkpoint.name)
    folder.rename(folder.with_name(ident))


def prune(checkpoint: Path, keep: str | None, *, keeps_last: bool = False) -> None:
    """Delete histories of earlier checkpoints with this name, and abandoned partial folders.

    `keep`: an id. `keeps_last`: the previous ones too, as an asynchronous save may be under way.
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
    with suppress(OSError):  # not empty, or missing
        folder.rmdir()


def _age(path: Path) -> float:
    """Return the negative modification time, which is larger for older paths."""
    try:
        return -path.stat().st_mtime
    except OSError:  # another run has deleted it
        return -time.time()


def _owner(folder: Path) -> str:
    """Return the checkpoint name in a histories folder; empty if there is none."""
    try:
        return (folder / _OWNER).read_text()
    except OSError:  # not finished, or another run has deleted it
        return ""


def read_stages(folder: Path, num_stages: int) -> tuple[dict[Any, Any], ...]:
    """Return each rank's histories, memory-mapped; empty unless all files are there.

    Without a shared file system, a host has the files of its own ranks only.
    """
    paths = [folder / f"stage_{stage}.pt" for stage in range(num_stages)]
    if not all(path.is_file() for path in paths):
        return ()
    stages = []
    remedy = f"Delete {folder} to resume without histories: the first step is then exact."
    for stage, path in enumerate(paths):
        expected = f"the histories of stage {stage} of {num_stages} in {path}"
        with reading(expected=expected, remedy=remedy):
            stages.append(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    return tuple(stages)


@contextmanager
def reading(*, expected: str, remedy: str) -> Iterator[None]:
    """Raise a `CheckpointError` for any error: torch does not say what damaged files raise."""
    try:
        yield
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise CheckpointError(expected=expected, found=found, remedy=remedy) from error

"""Partitions kept on disk by content: a second run on the same graph starts without METIS.

A file holds the part of each node and a checksum. It is written under another name and renamed: it
is whole or absent, with any number of runs at once. Files used least recently make room.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from lightning_gnnpipe.graph.fingerprint import fold

log = logging.getLogger(__name__)

_VERSION = 1  # of the files, and of how parts are made
_MOST_BYTES = 4 << 30
_SUFFIX = ".parts"
_NUM_CHECKED = 16  # bytes of the checksum


def keep_parts(
    folder: str | Path | None, numbers: Iterable[int], make: Callable[[], Tensor]
) -> Tensor:
    """Return `[num_nodes]` what `make` returns, from the folder if it is kept there.

    `numbers` tell all that the result depends on. Files that cannot be read are written again.
    """
    if folder is None:
        return make()
    key = fold([_VERSION, *numbers])
    path = Path(folder) / f"{key % (1 << 64):016x}{_SUFFIX}"
    try:
        return _read(path, key)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("A kept partition is computed again: %s: %s.", path, error)
    parts = make()
    try:
        _write(path, key, parts.int().numpy().tobytes())
    except OSError as error:
        log.warning("The partition is not kept in %s: %s.", folder, error)
    return parts


def _read(path: Path, key: int) -> Tensor:
    content = path.read_bytes()
    parts, digest = content[:-_NUM_CHECKED], content[-_NUM_CHECKED:]
    if not parts or digest != _digest(key, parts):
        raise ValueError("it is damaged")
    with suppress(PermissionError):  # another user's
        os.utime(path)
    return torch.frombuffer(bytearray(parts), dtype=torch.int32).long()


def _write(path: Path, key: int, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # With the suffix, so that what a killed run leaves makes room too.
    partial = path.with_name(f"tmp{uuid4().hex}{_SUFFIX}")
    try:
        partial.write_bytes(content + _digest(key, content))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    with suppress(FileNotFoundError, PermissionError):  # another run makes room, another user's
        total = 0
        for one in sorted(path.parent.glob(f"*{_SUFFIX}"), key=lambda one: -one.stat().st_mtime):
            total += one.stat().st_size
            if total > _MOST_BYTES and one != path:
                one.unlink()


def _digest(key: int, content: bytes) -> bytes:
    salt = key.to_bytes(8, "little", signed=True)
    return blake2b(content, digest_size=_NUM_CHECKED, salt=salt).digest()

"""Sharded checkpoints: a folder to which each rank writes its own weights, read as a whole.

Beside the tensors of `torch.distributed.checkpoint` it has `meta.pt`, all but the tensors of
stages, and `histories/stage_0.pt`, ... (see `sidecar`).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from lightning_gnnpipe._compat_torch import (
    METADATA_TYPES,
    load_tensors,
    member_of_metadata,
    save_tensors,
)
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.saving.sidecar import reading, write_synced

_META = "meta.pt"
HISTORIES = "histories"
_CWD = -100  # AT_FDCWD of <fcntl.h>
_RENAME_EXCHANGE = 2  # of <stdio.h>


def is_sharded(path: Path) -> bool:
    """Whether `path` is a sharded checkpoint."""
    return (path / _META).is_file()


def part_of(path: Path) -> Path:
    """Return the temporary folder that moves to `path` when it is complete."""
    return path.with_name(f".{path.name}.part")


def write_shards(
    transport: Transport,
    path: Path,
    checkpoint: Mapping[str, Any],
    weights: Mapping[str, Any],
    optimizers: Sequence[Mapping[Any, Mapping[str, Any]]],
) -> dict[str, Any]:
    """Write tensors to `part_of(path)`, and return the metadata for `finish`; collective.

    `checkpoint`: Lightning's dump without weights and optimizer states. `weights` and `optimizers`
    (for each optimizer, states by parameter number) hold only the part that this rank writes.
    """
    tensors = {f"model/{key}": value for key, value in weights.items() if isinstance(value, Tensor)}
    plain = {key: value for key, value in weights.items() if not isinstance(value, Tensor)}
    scalars: list[dict[Any, dict[str, Any]]] = []
    for index, states in enumerate(optimizers):
        scalars.append({})
        for number, state in states.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{index}/{number}/{name}"] = value
                else:
                    scalars[index].setdefault(number, {})[name] = value
    with transport.explained(f"write the shards of {part_of(path)}"):
        writer, group = FileSystemWriter(part_of(path)), transport.everyone.members.group
        save_tensors(tensors, writer, transport.world.is_distributed, group)
    gathered = transport.everyone.all_gather_objects(scalars)
    merged = [
        {number: state for one in several for number, state in one.items()}
        for several in zip(*gathered, strict=True)
    ]
    return {"checkpoint": dict(checkpoint), "model": plain, "scalars": merged}


def finish(path: Path, meta: Mapping[str, Any]) -> None:
    """Write the metadata and move the folder to `path`, in place of an earlier checkpoint."""
    part = part_of(path)
    write_synced(part / _META, dict(meta))
    if not path.exists():
        part.rename(path)
        return
    _exchange(part, path)
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part)
    else:
        part.unlink()


def read_sharded(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return the checkpoint in Lightning's format; raise `CheckpointError` if it is damaged."""
    remedy = "Load an earlier checkpoint, or one that was saved with plain types only."
    with reading(expected=f"a checkpoint in {path}", remedy=remedy):
        meta = torch.load(path / _META, map_location="cpu", weights_only=weights_only)
        checkpoint: dict[str, Any] = dict(meta["checkpoint"])
        state: dict[str, Any] = dict(meta["model"])
        optimizers = [dict(one) for one in meta["scalars"]]
    for name, tensor in load_shards(path).items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            state[rest] = tensor
        else:
            index, number, key = rest.split("/", 2)
            optimizers[int(index)].setdefault(int(number), {})[key] = tensor
    checkpoint["state_dict"] = state
    for dumped, states in zip(checkpoint.get("optimizer_states", ()), optimizers, strict=False):
        dumped["state"] = dict(sorted(states.items()))
    return checkpoint


def _exchange(first: Path, second: Path) -> None:
    """Swap two paths, atomically if the system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28
    names = os.fsencode(first), os.fsencode(second)
    if rename is None or rename(_CWD, names[0], _CWD, names[1], _RENAME_EXCHANGE):
        third = first.with_suffix(".old")
        shutil.rmtree(third, ignore_errors=True)  # left by an interrupted save
        second.rename(third)
        first.rename(second)
        third.rename(first)


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Return all ranks' tensors on CPU; raise `CheckpointError` if the folder is damaged."""
    reader = _SafeReader(folder)
    expected = f"the shards of a checkpoint in {folder}"
    with reading(expected=expected, remedy="Load an earlier checkpoint."):
        entries = reader.read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, dcp_metadata.TensorStorageMetadata)
        }
        load_tensors(tensors, reader)
    return tensors


class _SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: dcp_metadata.Metadata = _MetadataUnpickler(file).load()
        found = metadata.storage_meta
        metadata.storage_meta = dcp_metadata.StorageMeta() if found is None else found
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Only loads listed types that hold data, so that no file can make the reader run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return member_of_metadata
        if name in METADATA_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")

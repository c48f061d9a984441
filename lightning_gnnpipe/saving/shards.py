"""A folder to which every rank writes its tensors, by torch.distributed.checkpoint.

It is read as a whole, on any number of ranks. The unpickler only loads listed types that hold
data, so no file can make the reader run code.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from lightning_gnnpipe._compat_torch import (
    METADATA_TYPES,
    load_tensors,
    member_of_metadata,
    save_tensors,
)
from lightning_gnnpipe.comm import UNKNOWN_BYTES, Transport
from lightning_gnnpipe.errors import CheckpointError, explain


def save_shards(transport: Transport, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's tensors, under names that no other rank uses; collective."""
    writer = FileSystemWriter(folder)
    group = transport.everyone.members.group
    with transport.explained(f"write the shards of {folder}", UNKNOWN_BYTES):
        save_tensors(tensors, writer, transport.world.is_distributed, group)


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Return all ranks' tensors on CPU; raise `CheckpointError` if the folder is damaged."""
    reader = _SafeReader(folder)
    try:
        entries = reader.read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, dcp_metadata.TensorStorageMetadata)
        }
        load_tensors(tensors, reader)
    except (Exception, CheckpointException) as error:  # torch does not say what damage raises
        raise CheckpointError(
            explain(
                expected=f"the shards of a checkpoint in {folder}",
                found=f"{type(error).__name__}: {error}",
                remedy="Load an earlier checkpoint.",
            )
        ) from error
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
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return member_of_metadata
        if name in METADATA_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")

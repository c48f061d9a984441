"""Read what a Weights & Biases run logged offline; wandb itself has no reader for its file.

The file is a LevelDB log: 7 bytes of header, then blocks of 32 KiB with pieces of records, each
behind a checksum (4 bytes), a length (2) and a kind (1): whole, first, middle or last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7
_WHOLE, _LAST = 1, 4


def read_offline_run(folder: Path) -> list[dict[str, Any]]:
    """Return what each call of ``log`` logged in the only run below ``folder``."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.rglob("run-*.wandb")
    logged = []
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            logged.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    return logged


def _records(content: bytes) -> Iterator[bytes]:
    at, parts = _FILE_HEADER, b""
    while at + _HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # padding
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""

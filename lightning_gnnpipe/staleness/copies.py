"""Tables of histories, and copies between a GPU and the host, which do not stop the host.

    compute stream   c: layers .. rows .. layers ..   c + 1: layers .. rows .. layers
    copy stream                     `-> host                             `-> host
    host             c + 1 reads rows of c: waits for that copy alone, gathers, starts the copy back

Tables on the host lie in pinned memory, or in files. Between other devices copies are plain, and
done at once.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError

Wait = Callable[[], object]
FreeTables = dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]]


def done() -> None:
    """Wait for a copy that is done."""


class HostCopies:
    """Makes tables, and starts copies in both directions.

    `device`: of histories; None for that of the layers. `folder`: where tables on the host are
    files; None for memory. `free`: tables in files that nobody reads: new tables take these first,
    and `give_back` adds to them. None: each table is a new file.

    Attributes:
        spare: Tables in files to delete when the disk is full.
    """

    def __init__(
        self,
        device: torch.device | None,
        folder: Path | None = None,
        free: FreeTables | None = None,
    ) -> None:
        is_host = device is not None and device.type == "cpu"
        self._pins = is_host and torch.cuda.is_available()
        self._folder, self._free = folder, free
        self.spare: FreeTables = {} if free is None else free
        self._lent: dict[int, Tensor] = {}  # by address, what `give_back` may take
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def table(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a table on `device`, not initialised; on the host it is a file of the folder.

        Raises:
            ConfigError: If the folder has no room.
        """
        if self._folder is None or device.type != "cpu" or 0 in shape:
            return self.buffer(shape, dtype, device)
        if self._free is None:
            return self._map(self._folder, shape, dtype)
        known = self._free.get((tuple(shape), dtype))
        found = known.pop() if known else self._map(self._folder, shape, dtype)
        self._lent[found.data_ptr()] = found
        return found

    def give_back(self, tensors: Iterable[Tensor | None] | None = None) -> None:
        """Free `tensors` for later tables; by default all. What is no table is ignored."""
        given = [*self._lent.values()] if tensors is None else tensors
        for one in given:
            table = None if one is None else self._lent.pop(one.data_ptr(), None)
            if table is not None and self._free is not None:
                self._free.setdefault((tuple(table.shape), table.dtype), []).append(table)

    def _map(self, folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        try:
            try:
                return _open(folder, shape, dtype)
            except OSError as error:
                if not self.spare or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self.spare.clear()
                return _open(folder, shape, dtype)
        except OSError as error:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            raise ConfigError(
                expected=f"a folder with room for {num_bytes / 2**30:.3g} GiB more as "
                "'table_folder'",
                found=f"{error.strerror}: {folder}",
                remedy="Name a folder on a larger disk, or leave it out.",
            ) from None

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy in a file; the tensor itself if tables are memory."""
        if self._folder is None or tensor.device.type != "cpu":
            return tensor
        return self.table(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory on `device`, not initialised; pinned if it is the host of a GPU."""
        pins = self._pins and device.type == "cpu"
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pins)

    def send(self, rows: Tensor, place: Tensor) -> Wait:
        """Start to copy `rows` to `place`; return a function that waits for it."""
        if not (rows.is_cuda and place.is_pinned()):
            place.copy_(rows)
            return done
        if rows.device not in self._streams:
            self._streams[rows.device] = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        stream = self._streams[rows.device]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            place.copy_(rows, non_blocking=True)
            event.record(stream)
        rows.record_stream(stream)  # or its memory could be used again before it is copied
        return event.synchronize

    def fetch(self, rows: Tensor, positions: Tensor, out: Tensor) -> None:
        """Copy `rows[positions]` to `out`, in the order of its stream."""
        if (rows.dtype, rows.device) == (out.dtype, out.device):
            torch.index_select(rows, 0, positions, out=out)
            return
        found = self.buffer((positions.numel(), *rows.shape[1:]), rows.dtype, rows.device)
        torch.index_select(rows, 0, positions, out=found)
        out.copy_(found, non_blocking=True)

    def bring(self, rows: Tensor, device: torch.device) -> Tensor:
        """Return a copy of `rows` on `device`, in the order of its stream."""
        found = self.buffer(rows.shape, rows.dtype, rows.device).copy_(rows)
        return found.to(device, non_blocking=True)


def _open(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a table in a new file."""
    size = torch.Size(shape).numel()
    folder.mkdir(parents=True, exist_ok=True)
    number, path = tempfile.mkstemp(prefix="table-", dir=folder)
    try:
        os.posix_fallocate(number, 0, size * dtype.itemsize)  # or a full disk would end the process
        found = torch.from_file(path, shared=True, size=size, dtype=dtype)
    finally:
        os.close(number)
        os.unlink(path)  # the file lives as long as the tensor
    return found.view(tuple(shape))

"""Copies between layers on a GPU and histories on the host, which do not stop the host.

    compute stream   c: layers .. rows .. layers ..   c + 1: layers .. rows .. layers
    copy stream                     `-> host                             `-> host
    host             c + 1 reads rows of c: waits for that copy alone, gathers, starts the copy back

Tables on the host lie in pinned memory. Between other devices copies are plain, and done at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Wait = Callable[[], object]


def done() -> None:
    """Wait for a copy that is done."""


class HostCopies:
    """Starts copies in both directions; `device` of histories is None for that of the layers."""

    def __init__(self, device: torch.device | None) -> None:
        is_host = device is not None and device.type == "cpu"
        self._pins = is_host and torch.cuda.is_available()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def table(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory on `device`; pinned if it is the host of layers on a GPU."""
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
        found = self.table((positions.numel(), *rows.shape[1:]), rows.dtype, rows.device)
        torch.index_select(rows, 0, positions, out=found)
        out.copy_(found, non_blocking=True)

    def bring(self, rows: Tensor, device: torch.device) -> Tensor:
        """Return a copy of `rows` on `device`, in the order of its stream."""
        found = self.table(rows.shape, rows.dtype, rows.device).copy_(rows)
        return found.to(device, non_blocking=True)

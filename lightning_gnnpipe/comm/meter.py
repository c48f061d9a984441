"""Counts the payload bytes that this rank receives, by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_gnnpipe.types import TrafficKind


class Meter:
    """Bytes received since the last reset, by kind; `control` is all but the payload of steps."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def count(self, kind: TrafficKind, *tensors: Tensor) -> None:
        """Add the bytes of `tensors` to `kind`."""
        self.count_bytes(kind, sum(tensor.nbytes for tensor in tensors))

    def count_bytes(self, kind: TrafficKind, num_bytes: int) -> None:
        """Add `num_bytes` to `kind`."""
        self._bytes[kind] += num_bytes

    def recount(self, kind: TrafficKind, other: TrafficKind, num_bytes: int) -> None:
        """Move `num_bytes` from `kind` to `other`."""
        self._bytes[kind] -= num_bytes
        self._bytes[other] += num_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the block."""
        before = self._bytes.copy()
        try:
            yield
        finally:
            self._bytes = before

    def read(self) -> dict[str, int]:
        """Return bytes by kind."""
        return dict(self._bytes)

    def reset(self) -> None:
        """Set all counts to 0."""
        self._bytes.clear()

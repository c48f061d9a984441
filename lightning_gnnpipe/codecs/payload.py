"""Payload of a message: one tensor as flat uint8, of a size that both ends know.

The size follows from shape and dtype alone. Only floating-point values are coded, and only if
that makes the payload smaller. All other tensors are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnnpipe.types import TrafficKind


class Codec:
    """Sends tensors unchanged; base of the other codecs. `name`: see `get_codec`."""

    def __init__(self, name: str = "fp32") -> None:
        self.name = name

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the size of the payload of a tensor of this shape and dtype, in bytes."""
        plain = prod(shape) * dtype.itemsize
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return plain
        return min(plain, self._coded_bytes(shape, dtype))

    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        """Return the payload of `tensor`, `[num_rows, *channels]`, on the same device.

        It may share memory with an uncoded `tensor`. `seed`: 32 bits for this message's own random
        numbers. Repeated seeds repeat the rounding errors, which then do not average out.
        """
        if self._codes(tensor):
            return self._encode(tensor.detach(), seed)
        return _bytes_of(tensor)

    def landing_for(self, out: Tensor) -> Tensor:
        """Return the buffer to receive the payload for `out`: `out` itself if it is uncoded."""
        if out.is_contiguous() and not self._codes(out):
            return _bytes_of(out)
        num_bytes = self.payload_bytes(out.shape, out.dtype)
        return torch.empty(num_bytes, dtype=torch.uint8, device=out.device)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decode `payload` into `out`, on the same device; no copy if it was received in `out`."""
        assert payload.numel() == self.payload_bytes(out.shape, out.dtype)
        if self._codes(out):
            self._decode(payload, out.detach())
        elif payload.data_ptr() != out.data_ptr():
            out.detach().copy_(payload.view(out.dtype).view(out.shape))

    def _codes(self, tensor: Tensor) -> bool:
        return self.payload_bytes(tensor.shape, tensor.dtype) < tensor.nbytes

    def _coded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return prod(shape) * dtype.itemsize

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        raise NotImplementedError

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        raise NotImplementedError


class Codecs(NamedTuple):
    """The codecs of rows and of their gradients."""

    rows: Codec
    grads: Codec

    def of(self, kind: TrafficKind) -> Codec:
        return self.grads if kind in ("backward", "halo_grad") else self.rows

    @property
    def is_exact(self) -> bool:
        return self.rows.name == self.grads.name == "fp32"


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class Parcel:
    """Receive buffer for the tensor `buffer`.

    `place` receives the bytes; it is on `wire`, the device that messages are sent on.
    """

    def __init__(self, buffer: Tensor, codec: Codec, wire: torch.device) -> None:
        self.buffer = buffer
        self._codec = codec
        self._landing = codec.landing_for(buffer)
        is_there = self._landing.device == wire
        self.place = self._landing if is_there else torch.empty_like(self._landing, device=wire)

    @property
    def num_bytes(self) -> int:
        return self.place.numel()

    def open(self) -> Tensor:
        """Decode the received bytes into `buffer`, and return it."""
        if self.place is not self._landing:
            self._landing.copy_(self.place)
        self._codec.decode(self._landing, self.buffer)
        return self.buffer

"""What is sent of a tensor: one flat run of bytes of a size that both ends know.

Goes in: a tensor `[num_rows, *channels]`. Comes out: its payload, a flat uint8 tensor. The size
follows from shape and dtype alone, so nothing has to be announced. Only floating-point values are
coded, and only where that makes the payload smaller; all else is sent as it is: integers, booleans,
tensors that are as short already, rows of too few channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Codec:
    """Sends tensors as they are; the base of the codecs that do not.

    Attributes:
        name: As `get_codec` knows it.
    """

    def __init__(self, name: str = "fp32") -> None:
        self.name = name

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the size of the payload of a tensor of this shape and dtype, in bytes."""
        plain = prod(shape) * dtype.itemsize
        if not dtype.is_floating_point or dtype.itemsize == 1:
            return plain
        return min(plain, self._coded_bytes(shape, dtype))

    def encode(self, tensor: Tensor, seed: int) -> Tensor:
        """Return the payload of `tensor`; it may share memory with `tensor`, if sent as it is.

        Args:
            tensor: `[num_rows, *channels]`, on any device, which is also the payload's.
            seed: Of this message's random numbers, 32 bits of it, if the codec takes any; no other
                stream is touched. Repeated seeds repeat the errors, which then do not average out.
        """
        if self._codes(tensor):
            return self._encode(tensor.detach(), seed)
        return _bytes_of(tensor)

    def landing_for(self, out: Tensor) -> Tensor:
        """Return where to receive the payload for `out`: `out` itself, if it is sent as it is."""
        if out.is_contiguous() and not self._codes(out):
            return _bytes_of(out)
        num_bytes = self.payload_bytes(out.shape, out.dtype)
        return torch.empty(num_bytes, dtype=torch.uint8, device=out.device)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Overwrite `out` by what the payload was made of, or comes closest to it.

        Args:
            payload: `[payload_bytes]`, of `encode`, or received where `landing_for` has said.
            out: Of the tensor's shape and dtype, on the payload's device.
        """
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


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class Parcel:
    """Where one tensor is received.

    Args:
        buffer: Where it is wanted.
        codec: That it is sent with.
        wire: The device that messages travel on.

    Attributes:
        place: Where its bytes come in.
    """

    def __init__(self, buffer: Tensor, codec: Codec, wire: torch.device) -> None:
        self.buffer = buffer
        self._codec = codec
        self._landing = codec.landing_for(buffer)
        is_there = self._landing.device == wire
        self.place = self._landing if is_there else torch.empty_like(self._landing, device=wire)

    @property
    def num_bytes(self) -> int:
        """What is received."""
        return self.place.numel()

    def open(self) -> Tensor:
        """Return the tensor, after its bytes have come in."""
        if self.place is not self._landing:
            self._landing.copy_(self.place)
        self._codec.decode(self._landing, self.buffer)
        return self.buffer

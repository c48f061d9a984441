"""A tensor on its way in: from the wire, through the codec, to where it is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnnpipe.comm.payload import Codec


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

"""What a message costs: so many seconds whatever its size, and so many bytes a second on top.

    seconds = message_s + num_bytes / bytes_per_s

Source: Hockney, The communication challenge for MPP (1994).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from lightning_gnnpipe.comm.transport import Transport

MESSAGE_S = 2e-4
"""Usual seconds of a message, whatever its size: gloo between two processes of one machine, median
of `measure_link`. See `examples/benchmarks/prediction`."""

_SMALL_BYTES, _MIDDLE_BYTES, _MOST_BYTES = 2**10, 2**16, 2**23
_MOST_S = 0.2  # of one large message
_NUM_SMALL, _NUM_MIDDLE, _NUM_LARGE = 11, 3, 3


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a rank to the others.

    Attributes:
        bytes_per_s: Its speed, each way.
        message_s: Seconds of a message, whatever its size.
    """

    bytes_per_s: float
    message_s: float = MESSAGE_S

    @staticmethod
    def of(gbit_per_s: float) -> Link:
        """Return a link of a known speed, with usual messages."""
        return Link(gbit_per_s * 1e9 / 8)

    @property
    def gbit_per_s(self) -> float:
        """Its speed in Gbit/s, each way."""
        return self.bytes_per_s * 8 / 1e9


def measure_link(transport: Transport) -> Link:
    """Return what messages between neighbouring ranks cost, of the slowest pair; collective.

    All ranks send to the next one, and receive from the one before, at the same time. It takes a
    second at the most down to 10 Mbit/s: the size of the large messages follows the speed.
    """
    _exchange_s(transport, _SMALL_BYTES, 1)  # connects
    small_s = _exchange_s(transport, _SMALL_BYTES, _NUM_SMALL)
    middle_s = _exchange_s(transport, _MIDDLE_BYTES, _NUM_MIDDLE)
    speed = _MIDDLE_BYTES / max(middle_s - small_s, 1e-6)
    num_bytes = max(_MIDDLE_BYTES, min(_MOST_BYTES, int(speed * _MOST_S)))
    large_s = _exchange_s(transport, num_bytes, _NUM_LARGE)
    return Link(num_bytes / max(large_s - small_s, 1e-6), small_s)


def _exchange_s(transport: Transport, num_bytes: int, num_times: int) -> float:
    """Return the median seconds of a message to the next rank, on the slowest rank."""
    world = transport.world
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    received = torch.empty_like(sent)
    taken = []
    for _ in range(num_times):
        transport.barrier()
        start = time.perf_counter()
        transport.exchange("control", [(following, sent)], [(previous, received)]).wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        taken.append(time.perf_counter() - start)
    all_ns = transport.all_gather_ints([round(median(taken) * 1e9)])
    return max(one for [one] in all_ns) / 1e9

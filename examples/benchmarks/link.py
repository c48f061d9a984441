"""What a message between ranks costs, measured as messages are in training.

Between two stretches of computing, into new memory.
"""

from __future__ import annotations

import time
from statistics import mean

import torch

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.planning import Link

_SMALL_BYTES, _LARGE_BYTES = 2**14, 2**22
_LONG_S = 0.02  # a message whose bytes take longer is large
_BUDGET_S = 0.4  # for all messages of a size
_LEAST, _MOST = 3, 40  # messages of a size
_COMPUTE_S = 2e-3


def measure_link(transport: Transport) -> Link:
    """Return what messages between neighbouring ranks cost, of the slowest pair; collective.

    All ranks send to the next one, and receive from the one before, at the same time. It takes less
    than two seconds down to 10 Mbit/s: how large messages are, and how many, follows the speed.
    """
    num_bytes = _SMALL_BYTES
    first_s = taken_s = _exchange_s(transport, num_bytes, 2)  # connects
    while num_bytes < _LARGE_BYTES and taken_s - first_s < _LONG_S:
        num_bytes *= 4
        taken_s = _exchange_s(transport, num_bytes, 1)
    small_s = _exchange_s(transport, _SMALL_BYTES, _count(first_s))
    large_s = _exchange_s(transport, num_bytes, _count(taken_s))
    more_s = max(large_s - small_s, 1e-3 * large_s, 1e-6)  # positive, whatever noise there is
    speed = (num_bytes - _SMALL_BYTES) / more_s
    return Link(speed, max(small_s - _SMALL_BYTES / speed, 0.0))


def _count(taken_s: float) -> int:
    """Return how many messages to time of which one takes `taken_s`."""
    return max(_LEAST, min(_MOST, int(_BUDGET_S / (taken_s + _COMPUTE_S))))


def _exchange_s(transport: Transport, num_bytes: int, num_times: int) -> float:
    """Return the mean seconds of a message to the next rank, on the slowest rank."""
    world = transport.world
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    taken = []
    for _ in range(num_times):
        transport.meet("measure the link")
        _compute(world.device)
        sent = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
        _synchronize(world.device)
        start = time.perf_counter()
        received = torch.empty_like(sent)
        transport.exchange("control", [(following, sent)], [(previous, received)])()
        _synchronize(world.device)
        taken.append(time.perf_counter() - start)
    all_ns = transport.meet("measure the link", [round(mean(taken) * 1e9)])
    return max(one for [one] in all_ns) / 1e9


def _compute(device: torch.device) -> None:
    """Keep the core, or the GPU, busy for a while."""
    table = torch.zeros((256, 256), device=device)
    start = time.perf_counter()
    while time.perf_counter() - start < _COMPUTE_S:
        torch.mm(table, table)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Measuring what layers cost: forward and backward, each timed on its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median


def measure_costs(layers: Sequence[Callable[[], object]], *, repeats: int = 3) -> list[float]:
    """Return the median seconds that each of `layers` takes, after one run to warm up.

    Args:
        layers: Each runs one layer, forward and backward, and waits for the device.
        repeats: Timed runs a layer.
    """
    return [_time(layer, repeats) for layer in layers]


def _time(layer: Callable[[], object], repeats: int) -> float:
    layer()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        layer()
        times.append(time.perf_counter() - start)
    return median(times)

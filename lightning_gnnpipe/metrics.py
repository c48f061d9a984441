"""Metrics: each rank computes them from the same outputs, so they must not be summed over ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchmetrics import Metric


class LocalMetrics:
    """The metrics of a module, told that there are no other ranks."""

    def __init__(self) -> None:
        self._metrics: list[tuple[Metric, Any]] = []

    def attach(self, module: nn.Module) -> None:
        """Let the metrics of `module` compute on their own."""
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            self._metrics.append((metric, metric.distributed_available_fn))
            metric.distributed_available_fn = _never

    def detach(self) -> None:
        """Give the metrics back as they were."""
        for metric, is_available in self._metrics:
            metric.distributed_available_fn = is_available
        self._metrics.clear()


def _never() -> bool:
    return False

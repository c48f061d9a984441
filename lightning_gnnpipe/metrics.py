"""Metrics: ranks of a replica compute the same ones, so they are put together over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

Gather = Callable[..., list[Tensor]]


class PipelineMetrics:
    """The metrics of a module, told who else there is."""

    def __init__(self) -> None:
        self._metrics: list[tuple[Metric, Any, Any]] = []

    def attach(self, module: nn.Module, gather: Gather | None) -> None:
        """Let the metrics of `module` compute over replicas.

        Args:
            module: The module.
            gather: Returns a state of all replicas; None if there is one.
        """
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            before = metric.distributed_available_fn, metric.dist_sync_fn
            self._metrics.append((metric, *before))
            metric.distributed_available_fn = _never if gather is None else _always
            if metric.dist_sync_fn is None:
                metric.dist_sync_fn = gather

    def detach(self) -> None:
        """Give the metrics back as they were."""
        for metric, is_available, gather in self._metrics:
            metric.distributed_available_fn, metric.dist_sync_fn = is_available, gather
        self._metrics.clear()


def _never() -> bool:
    return False


def _always() -> bool:
    return True

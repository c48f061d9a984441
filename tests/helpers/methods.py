"""Staleness methods that have no name."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.staleness import METHODS, StalenessMethod


@dataclass(frozen=True, slots=True)
class _Options(StrategyOptions):
    """Has any method."""

    given: StalenessMethod = METHODS["constant"]

    @property
    def method(self) -> StalenessMethod:
        return self.given


def with_method(strategy: GNNPipeStrategy, method: StalenessMethod) -> GNNPipeStrategy:
    """Have `strategy` meet staleness by `method`; return it."""
    options = strategy.options
    known = {field.name: getattr(options, field.name) for field in fields(options)}
    strategy.options = strategy._host._options = _Options(**known, given=method)
    return strategy

"""How stale rows and gradients between chunks are handled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DENSE = 0.7  # share of edges between chunks above which stale reads cost accuracy


@dataclass(frozen=True, slots=True)
class StalenessMethod:
    """What stale reads return, and what becomes of gradients between chunks.

    Stale rows are constants, those of the last step unless it says otherwise.

    Attributes:
        follows_drift: Whether stale rows are moved as far as the rows that have run, on average.
        linear_scale: Factor on the gradients of fresh rows of other chunks in layers that make a
            weighted sum of them.
        dense_scale: The same where more than 70 % of all edges lie between chunks, as in random
            chunks or dense graphs; None for `linear_scale` there as well.
        message_scale: The same in layers with messages of another kind, such as attention.
        takes_validation: Whether stale rows are those of validation where it has just run: of the
            present weights, without dropout.
        snapshot_steps: Stale rows are read from a snapshot of all rows, which is renewed at the end
            of every so many steps, and of every exact one; None for the rows themselves.
    """

    follows_drift: bool = False
    linear_scale: float = 1.0
    dense_scale: float | None = None
    message_scale: float = 1.0
    takes_validation: bool = False
    snapshot_steps: int | None = None

    def scale_of_sums(self, cut_frac: float) -> float:
        """Return the factor in layers that make a weighted sum.

        Args:
            cut_frac: The share of edges between chunks.
        """
        if self.dense_scale is None or cut_frac <= DENSE:
            return self.linear_scale
        return self.dense_scale


METHODS: Mapping[str, StalenessMethod] = MappingProxyType(
    {
        "drift": StalenessMethod(
            follows_drift=True, dense_scale=2.0, message_scale=2.0, takes_validation=True
        ),
        "constant": StalenessMethod(),
        "gnnpipe": StalenessMethod(linear_scale=2.0, message_scale=2.0, snapshot_steps=23),
    }
)
"""The methods by name. Source of "gnnpipe": GNNPipe (arXiv 2308.10087), techniques 2 and 3."""


def name_method(method: StalenessMethod) -> str:
    """Return the name of a method, or what it consists of."""
    return next((name for name, one in METHODS.items() if one == method), repr(method))

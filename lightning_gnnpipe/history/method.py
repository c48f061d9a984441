"""How staleness is met: a rule for gradients of stale rows, and one for what reads return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history.blocks import BlockGradients
from lightning_gnnpipe.history.delayed import DelayedGradients
from lightning_gnnpipe.history.gradients import DroppedGradients, GradientRule
from lightning_gnnpipe.history.reads import LastRows, ReadRule, RenewedRows, SnapshotRows


@dataclass(frozen=True)
class StalenessMethod:
    """How staleness is met, in gradients and in reads.

    Args:
        gradients: What becomes of the gradients of stale rows: `DroppedGradients`,
            `DelayedGradients`, `AdaptiveGradients` or `BlockGradients`.
        reads: What a read of a stale row returns: `LastRows`, `SnapshotRows`, `ExtrapolatedRows`,
            `SmoothedRows` or `RenewedRows`.

    Raises:
        ConfigError: If they are something else.

    Example:
        >>> from lightning_gnnpipe import DelayedGradients, StalenessMethod
        >>> method = StalenessMethod(DelayedGradients(decay=0.5))
    """

    gradients: GradientRule = field(default_factory=DroppedGradients)
    reads: ReadRule = field(default_factory=LastRows)

    def __post_init__(self) -> None:
        for name, kind in (("gradients", GradientRule), ("reads", ReadRule)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(
                    explain(
                        expected=f"'{name}' of StalenessMethod to be a {kind.__name__}",
                        found=repr(value),
                        remedy="Use one of lightning_gnnpipe, such as DelayedGradients() for "
                        "'gradients' and LastRows() for 'reads'.",
                    )
                )


METHODS: Mapping[str, StalenessMethod] = MappingProxyType(
    {
        "predicted": StalenessMethod(
            DelayedGradients(decay=0.5, scale=1.5, lead=0.5), RenewedRows(None, noise=0.7)
        ),
        "blocks": StalenessMethod(BlockGradients(), RenewedRows(None, noise=0.7)),
        "delayed": StalenessMethod(DelayedGradients()),
        "constant": StalenessMethod(),
        "scaled": StalenessMethod(DroppedGradients(scale=2.0)),
        "gnnpipe": StalenessMethod(DroppedGradients(scale=2.0), SnapshotRows()),
    }
)
"""The methods that have a name."""

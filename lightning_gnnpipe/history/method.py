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
    """How staleness is met, in gradients, in reads and in weights.

    With a `lookahead` the pipelined step e is computed, forward and backward, with

        w_e + lookahead (w_e - w_(e-1))

    in place of its weights w_e, which all others see: optimizers, validation, checkpoints, the
    user's loss. A late gradient is then one for about the weights that it changes. That takes the
    phase back that lateness costs, and other than the `lead` of gradients makes no noise, since
    weights move smoothly. After an exact step there is no w_(e-1), and nothing is carried forward;
    nor are weights outside of the pipelined module. Source: the predicted weights of SpecTrain
    (Chen et al., arXiv 1809.02839) for pipelines of batches, with the last step in place of the
    optimizer's momentum, so that it is any optimizer's.

    Args:
        gradients: What becomes of the gradients of stale rows: `DroppedGradients`,
            `DelayedGradients`, `AdaptiveGradients` or `BlockGradients`.
        reads: What a read of a stale row returns: `LastRows`, `SnapshotRows`, `ExtrapolatedRows`,
            `SmoothedRows` or `RenewedRows`.
        lookahead: How many steps weights are carried forward, from 0 to 8; with `BlockGradients`
            for each step that a weight's gradient is late.

    Raises:
        ConfigError: If they are something else.

    Example:
        >>> from lightning_gnnpipe import DelayedGradients, StalenessMethod
        >>> method = StalenessMethod(DelayedGradients(decay=0.5))
    """

    gradients: GradientRule = field(default_factory=DroppedGradients)
    reads: ReadRule = field(default_factory=LastRows)
    lookahead: float = 0.0

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
        if not 0 <= self.lookahead <= 8:
            raise ConfigError(
                explain(
                    expected="'lookahead' of StalenessMethod to be from 0 to 8",
                    found=str(self.lookahead),
                    remedy="0 computes with the weights as they are; 4 is a good value.",
                )
            )


METHODS: Mapping[str, StalenessMethod] = MappingProxyType(
    {
        "predicted": StalenessMethod(
            DelayedGradients(decay=0.5, scale=1.5, lead=0.5), RenewedRows(None, noise=0.7)
        ),
        "lookahead": StalenessMethod(
            DelayedGradients(), RenewedRows(None, noise=0.7), lookahead=4.0
        ),
        "blocks": StalenessMethod(BlockGradients(), RenewedRows(None, noise=0.7), lookahead=2.0),
        "delayed": StalenessMethod(DelayedGradients()),
        "constant": StalenessMethod(),
        "scaled": StalenessMethod(DroppedGradients(scale=2.0)),
        "gnnpipe": StalenessMethod(DroppedGradients(scale=2.0), SnapshotRows()),
    }
)
"""The methods that have a name."""

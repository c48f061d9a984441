"""How staleness is met: a rule for gradients of stale rows, and one for what reads return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history.delayed import DelayedGradients
from lightning_gnnpipe.history.gradients import DroppedGradients, GradientRule
from lightning_gnnpipe.history.reads import LastRows, ReadRule, RenewedRows, SnapshotRows


@dataclass(frozen=True)
class StalenessMethod:
    """How staleness is met, in gradients, in reads and in weights.

    With a `lookahead` of d the pipelined step e is computed, forward and backward, with

        w_e + (r + r^2 + ... + r^d) s_e,    s_e = w_e - w_(e-1),
        r = <s_e, s_(e-1)> / max(|s_e|^2, |s_(e-1)|^2), at least 0

    in place of each parameter w_e of the pipelined module, which optimizers, validation and
    checkpoints see. A late gradient is then one for about the weights that it changes. That takes
    the phase back that lateness costs, and makes no noise, since weights move smoothly; where they
    do not, because the optimizer has no momentum, or since they swing, r is small and they stay
    where they are. So it is for the first two steps after an exact one, or a loss that was not
    finite; where gradients are accumulated over passes of one graph; for parameters that the module
    writes to while it computes; and if no edge joins two chunks.
    Source: the predicted weights of SpecTrain (Chen et al., arXiv 1809.02839) for pipelines of
    batches, which carry weights on along the optimizer's momentum; to foresee steps from those that
    were made is ours.

    Args:
        gradients: What becomes of the gradients of stale rows: `DroppedGradients` or
            `DelayedGradients`.
        reads: What a read of a stale row returns: `LastRows`, `SnapshotRows` or `RenewedRows`.
        lookahead: d, the steps that are foreseen, from 0 to 8.

    Raises:
        ConfigError: If they are something else.

    Example:
        >>> from lightning_gnnpipe import DelayedGradients, StalenessMethod
        >>> method = StalenessMethod(DelayedGradients(decay=0.5))
    """

    gradients: GradientRule = field(default_factory=DroppedGradients)
    reads: ReadRule = field(default_factory=LastRows)
    lookahead: int = 0
    follows_drift: bool = False

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
        is_count = isinstance(self.lookahead, int) and not isinstance(self.lookahead, bool)
        if not (is_count and 0 <= self.lookahead <= 8):
            raise ConfigError(
                explain(
                    expected="'lookahead' of StalenessMethod to be a whole number from 0 to 8",
                    found=str(self.lookahead),
                    remedy="0 computes with the weights as they are; beyond 4 little is gained.",
                )
            )


METHODS: Mapping[str, StalenessMethod] = MappingProxyType(
    {
        "lookahead": StalenessMethod(
            DelayedGradients(decay=0.5, scale=1.5, fades=True),
            RenewedRows(None, noise=0.7),
            lookahead=4,
        ),
        "delayed": StalenessMethod(DelayedGradients()),
        "constant": StalenessMethod(),
        "gnnpipe": StalenessMethod(DroppedGradients(scale=2.0), SnapshotRows()),
    }
)
"""The methods that have a name."""

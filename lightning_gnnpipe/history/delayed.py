"""Delayed gradients: what comes too late for a stale row in one step is used in the next.

    fresh reader (later in the order)     its gradient of this step
    stale reader (earlier in the order)   its gradient of the last step, carried forward

So every edge between chunks counts in every step, whatever the orders of the two steps are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history.gradients import GradientBuffer, GradientRule
from lightning_gnnpipe.history.waiting import WaitingBuffer

NUM_SHARES = 4  # of the largest learning rate; each has factors on edges of its own


@dataclass(frozen=True)
class DelayedGradients(GradientRule):
    """A stale row is given the gradient that its reader had for it in the step before.

    With a_e the gradient that a reader in another chunk has for a row in step e:

        dH += scale a_e        if the reader comes later in the order of step e
        dH += decay a_(e-1)    if it comes earlier, and has read the row stale

    What comes over m stale edges is m steps old. Where most edges are between chunks that is long
    enough for training to swing, as a control loop with a dead time does. Less of what is late
    stops it, at the price of a bias for longer paths: with `scale` = 2 - `decay` every edge between
    chunks counts once on average over random orders. So do weights carried forward: see the
    `lookahead` of `StalenessMethod`.

    An exact step needs no such gradients and drops those that wait. They are kept for each chunk's
    halo; those of linear layers in the buffer of their outputs' gradients, which there is anyway.
    Statistics of norms stay constants.

    With `fades`, `decay` and `scale` are those of the largest learning rate so far; at a share r of
    it they are 1 + r (decay - 1) and 1 + r (scale - 1), with r rounded to quarters. What waits is
    given as the step that found it has damped it. Late gradients do harm as far as weights have
    moved meanwhile, and damping is a bias: as the rate falls to nothing, so do both.

    Source: the stale gradients of PipeGCN (arXiv 2203.10428), between chunks instead of partitions;
    also the backward compensation of LMC (arXiv 2302.00924) with beta = 0, that is by historical
    values alone. A beta above 0 needs every layer computed on the halo too. `fades` is ours.

    Args:
        decay: Factor on what waited, from 0 to 1. What comes over m stale edges is damped by
            decay^m.
        scale: Factor on what is in time, above 0.
        fades: Whether `decay` and `scale` go to 1 as the learning rate falls. Of several rates the
            one counts that has fallen least; while one rises it is the largest so far.

    Raises:
        ConfigError: If one of them is out of its range.
    """

    decay: float = 1.0
    scale: float = 1.0
    fades: bool = False

    def __post_init__(self) -> None:
        for name, is_right, bounds, remedy in (
            ("decay", 0 <= self.decay <= 1, "from 0 to 1", "1 leaves what waited as it is."),
            ("scale", self.scale > 0, "above 0", "1 leaves what is in time as it is."),
            (
                "decay",
                self.decay > 0 or not self.fades,
                "above 0 if it fades",
                "DroppedGradients drop what comes too late at any rate.",
            ),
        ):
            if not is_right:
                raise ConfigError(
                    explain(
                        expected=f"'{name}' of DelayedGradients to be {bounds}",
                        found=str(getattr(self, name)),
                        remedy=remedy,
                    )
                )

    @property
    def scales(self) -> tuple[float, ...]:
        shares = range(NUM_SHARES + 1) if self.fades else (NUM_SHARES,)
        return tuple(self.at_rate(share / NUM_SHARES).scale for share in shares)

    def at_rate(self, share: float) -> DelayedGradients:
        """Return the rule for such a share of the largest learning rate, from 0 to 1."""
        if not self.fades:
            return self
        share = round(NUM_SHARES * share) / NUM_SHARES
        decay, scale = (1 + share * (one - 1) for one in (self.decay, self.scale))
        return replace(self, decay=decay, scale=scale)

    def num_tables(self, *, recomputes: bool) -> int:
        return 1 + recomputes

    @property
    def keeps_halos(self) -> bool:
        return True

    def make_buffer(self) -> GradientBuffer:
        return WaitingBuffer(self)

"""What a read of a stale row returns: rules that change histories between two training steps.

Before a step's forward pass, what its stale reads will return is put into the rows; after it, what
later steps need of the rows is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, explain


@dataclass(slots=True)
class Rows:
    """The rows of one history.

    Attributes:
        now: `[num_rows, *]`: what is read.
        written: The step at which each chunk's rows were written.
        kept: `[num_rows, *]`: what a rule keeps beside them, if anything.
        kept_written: The steps at which chunks' rows of `kept` were written; empty if by none.
    """

    now: Tensor
    written: list[int]
    kept: Tensor | None = None
    kept_written: list[int] = field(default_factory=list)

    def keep(self) -> None:
        """Keep a copy of the rows as they are."""
        if self.kept is None or self.kept.dtype != self.now.dtype:
            self.kept = torch.empty_like(self.now)
        self.kept.copy_(self.now)
        self.kept_written = list(self.written)


class ReadRule:
    """What a read of a stale row returns."""

    @property
    def keeps_rows(self) -> bool:
        """Whether a second table of rows is kept."""
        return False

    @property
    def makes_passes(self) -> bool:
        """Whether a pass is made to recompute rows where validation has made none."""
        return False

    def renews(self, step: int) -> bool:
        """Whether all rows are to be those of an exact pass before step number `step`."""
        return False

    def before(self, rows: Rows, *, is_exact: bool) -> None:
        """Prepare the rows for the forward pass of a training step."""

    def after(self, rows: Rows, *, is_exact: bool, step: int) -> None:
        """Keep what later steps need, after the forward pass of training step number `step`."""

    def on_renewed(self, rows: Rows) -> None:
        """Take note that the rows were recomputed by an exact pass, and are not stale."""


@dataclass(frozen=True)
class LastRows(ReadRule):
    """A stale read returns the last value: with dropout, under the mask that it had.

    Source: GNNPipe (arXiv 2308.10087).
    """


@dataclass(frozen=True)
class SnapshotRows(ReadRule):
    """Stale reads come from a snapshot of all rows, which does not move with every step.

    It is renewed at the end of every n-th step and of every exact one.

    Source: GNNPipe (arXiv 2308.10087), technique 2.

    Args:
        every_n_steps: Steps between renewals (the paper: 23).

    Raises:
        ConfigError: If it is not a positive integer.
    """

    every_n_steps: int = 23

    def __post_init__(self) -> None:
        check_steps(self.every_n_steps)

    @property
    def keeps_rows(self) -> bool:
        return True

    def before(self, rows: Rows, *, is_exact: bool) -> None:
        if not is_exact and rows.kept is not None:
            rows.now.copy_(rows.kept)
            rows.written = list(rows.kept_written)

    def after(self, rows: Rows, *, is_exact: bool, step: int) -> None:
        if is_exact or (step + 1) % self.every_n_steps == 0:
            rows.keep()

    def on_renewed(self, rows: Rows) -> None:
        rows.keep()


@dataclass(frozen=True)
class RenewedRows(ReadRule):
    """Stale reads return rows of an exact forward pass with dropout off, before every n-th step.

    With v_e a row of that pass before step e, and h_e the one that step e has written:

        v_e + noise (h_j - v_j)             j: the last step before e with such a pass

    h_j - v_j is what dropout made of the row in step j, in all layers before it and whatever it is,
    and what stale rows, rounding and weights carried forward made of it. With `noise=0` stale rows
    have no dropout, and training sees so much less of it; with 1 they have that of another step.
    The noise takes one more table of the size of the histories. Where it is not known there is
    none: after the first pass, or a change of dtype; for integers; and with `async_halo` for rows
    of other shards.

    It costs a forward pass without overlap, unless validation has just written the rows, by one
    over the same graph and features. (Not with norms over all nodes, which in validation may not
    look at them, after something trainable, or where callbacks average weights.) Source: ours.

    Args:
        every_n_steps: Steps between such passes. None: none is made, and rows are those of
            validation after each step that it follows, at no cost; the last ones after others.
        noise: Share of the last step's dropout in the rows, from 0 to 1.

    Raises:
        ConfigError: If one of them is out of its range.
    """

    every_n_steps: int | None = 1
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.every_n_steps is not None:
            check_steps(self.every_n_steps)
        if not 0 <= self.noise <= 1:
            raise ConfigError(
                explain(
                    expected="'noise' of RenewedRows to be from 0 to 1",
                    found=str(self.noise),
                    remedy="With 0 stale rows have no dropout, with 1 that of the last step.",
                )
            )

    @property
    def keeps_rows(self) -> bool:
        return self.noise > 0

    @property
    def makes_passes(self) -> bool:
        return self.every_n_steps is not None

    def renews(self, step: int) -> bool:
        return step > 0 and step % (self.every_n_steps or 1) == 0

    def on_renewed(self, rows: Rows) -> None:
        """Add the noise, if it is known; keep the rows without it until it is known anew."""
        if not self.noise or not rows.now.is_floating_point():
            return
        if rows.kept is None or rows.kept_written or rows.kept.dtype != rows.now.dtype:
            rows.keep()
            return
        torch.add(rows.now, rows.kept, alpha=self.noise, out=rows.kept)
        rows.now, rows.kept, rows.kept_written = rows.kept, rows.now, list(rows.written)

    def after(self, rows: Rows, *, is_exact: bool, step: int) -> None:
        """Keep the noise: what is kept was written by no step then."""
        if rows.kept is not None and rows.kept_written:
            torch.sub(rows.now, rows.kept, out=rows.kept)
            rows.kept_written = []


def check_steps(value: object) -> None:
    """Refuse a number of steps that is not a positive integer.

    Raises:
        ConfigError: With the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            explain(
                expected="'every_n_steps' to be an integer of at least 1",
                found=repr(value),
                remedy="A step is an epoch over one graph.",
            )
        )

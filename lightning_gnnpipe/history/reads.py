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
        kept_written: The step at which each chunk's rows of `kept` were written.
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

    def renews(self, step: int) -> bool:
        """Whether all rows are recomputed before step number `step`, by an exact pass."""
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
class DropoutFreeRows(ReadRule):
    """Stale reads return rows of an exact forward pass with dropout off, before every n-th step.

    With n = 1 such a row differs from the fresh one by dropout alone. It costs a forward pass
    without overlap.

    Args:
        every_n_steps: Steps between such passes.

    Raises:
        ConfigError: If it is not a positive integer.
    """

    every_n_steps: int = 1

    def __post_init__(self) -> None:
        check_steps(self.every_n_steps)

    def renews(self, step: int) -> bool:
        return step > 0 and step % self.every_n_steps == 0


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

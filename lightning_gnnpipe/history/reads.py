"""What a read of a stale row returns: the last rows, or a snapshot of all of them.

A snapshot is put into the rows before a step's forward pass, and renewed after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Rows:
    """The rows of one history.

    Attributes:
        now: `[num_rows, *]`: what is read.
        written: The step at which each chunk's rows were written.
        kept: `[num_rows, *]`: a snapshot of them, if one is kept.
        kept_written: The steps at which chunks' rows of `kept` were written.
    """

    now: Tensor
    written: list[int]
    kept: Tensor | None = None
    kept_written: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows and of the snapshot."""
        return self.now.nbytes + (0 if self.kept is None else self.kept.nbytes)

    def keep(self) -> None:
        """Keep a snapshot of the rows as they are."""
        if self.kept is None or self.kept.dtype != self.now.dtype:
            self.kept = torch.empty_like(self.now)
        self.kept.copy_(self.now)
        self.kept_written = list(self.written)

    def take_kept(self) -> bool:
        """Put the snapshot into the rows; return whether there is one."""
        if self.kept is None:
            return False
        self.now.copy_(self.kept)
        self.written = list(self.kept_written)
        return True

"""How stale rows are handled: the method, its options, and what a stale read returns.

A read returns the last rows, or a snapshot of all rows. A snapshot is put into the rows before a
step's forward pass, and renewed after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class HistoryOptions:
    """How histories are kept.

    Attributes:
        method: How stale rows and gradients between chunks are handled.
        recomputes: Whether activations are computed again in backward. A linear layer's outputs are
            then kept until their gradient comes.
        dtype: Of the rows and, unless it is float16, of a linear layer's output gradients; None for
            the dtype of what is pushed.
        device: Of the histories and their gradient buffers; None for where the layers compute.
    """

    method: StalenessMethod = METHODS["constant"]
    recomputes: bool = False
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def seen_from(self, device: torch.device) -> HistoryOptions:
        """Return the options, without a device if it is `device`, where the layers compute."""
        own = self.device
        if own is None:
            return self
        is_here = own == device or (own.type == device.type and own.index is None)
        return replace(self, device=None) if is_here else self

    @property
    def is_too_narrow(self) -> bool:
        """Whether gradients do not fit into `dtype`, such as float16."""
        dtype = self.dtype
        return dtype is not None and torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny

    def linear_dtype(self, like: Tensor) -> torch.dtype:
        """Return the dtype of a linear layer's output gradients, which float16 cannot hold."""
        return like.dtype if self.dtype is None or self.is_too_narrow else self.dtype


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

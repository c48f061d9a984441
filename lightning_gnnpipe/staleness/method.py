"""Methods for stale rows, and options of histories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

DENSE = 0.7  # share of edges between chunks above which stale reads cost accuracy


@dataclass(frozen=True, slots=True)
class StalenessMethod:
    """How stale rows are read and gradients between chunks are scaled.

    Attributes:
        follows_drift: Add the mean drift of the rows computed so far to stale rows.
        linear_scale: Factor on gradients of fresh rows of other chunks in weighted sums of rows.
        dense_scale: Replaces `linear_scale` if more than 70 % of edges lie between chunks, as in
            random chunks or dense graphs; None for no replacement.
        message_scale: Like `linear_scale`, for all other layers, for example attention.
        snapshot_steps: Read stale rows from a snapshot, renewed every so many steps and after each
            exact step. None reads the last rows.
    """

    follows_drift: bool = False
    linear_scale: float = 1.0
    dense_scale: float | None = None
    message_scale: float = 1.0
    snapshot_steps: int | None = None

    def scale_of_sums(self, cut_frac: float) -> float:
        """Return the factor in weighted sums; `cut_frac`: share of edges between chunks."""
        if self.dense_scale is None or cut_frac <= DENSE:
            return self.linear_scale
        return self.dense_scale


# Source of "gnnpipe": GNNPipe (arXiv 2308.10087), techniques 2 and 3.
METHODS: Mapping[str, StalenessMethod] = MappingProxyType(
    {
        "drift": StalenessMethod(follows_drift=True, dense_scale=2.0, message_scale=2.0),
        "constant": StalenessMethod(),
        "gnnpipe": StalenessMethod(linear_scale=2.0, message_scale=2.0, snapshot_steps=23),
    }
)


def name_method(method: StalenessMethod) -> str:
    """Return the name of a method, or its repr if it has none."""
    return next((name for name, one in METHODS.items() if one == method), repr(method))


@dataclass(frozen=True, slots=True)
class HistoryOptions:
    """How histories are kept.

    Attributes:
        dtype: Dtype of rows and, unless float16, of output gradients of linear layers; None keeps
            the dtype of pushed rows.
        device: Device of rows and gradients; None for the device of the layers.
        folder: Folder of files that hold the tables on the host; None for memory.
    """

    method: StalenessMethod = METHODS["constant"]
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    folder: Path | None = None

    def seen_from(self, device: torch.device) -> HistoryOptions:
        """Replace the device by None if it is `device`, where the layers compute."""
        own = self.device
        if own is None:
            return self
        is_here = own == device or (own.type == device.type and own.index is None)
        return replace(self, device=None) if is_here else self

    @property
    def is_too_narrow(self) -> bool:
        """Whether small gradients underflow in `dtype`, as in float16."""
        dtype = self.dtype
        return dtype is not None and torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny

    @property
    def linear_dtype(self) -> torch.dtype | None:
        """Dtype of output gradients: `dtype` unless it is too narrow; None for as computed."""
        return None if self.is_too_narrow else self.dtype

"""How histories are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gnnpipe.history.method import METHODS, StalenessMethod


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

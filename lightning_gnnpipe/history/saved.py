"""A history as it goes into a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NEVER = -1


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """One history between two steps.

    Attributes:
        rows: `[num_nodes, *]`, in plan order.
        step: The step that wrote them.
        kept: The snapshot of them, `[num_nodes, *]`, if one is kept.
        kept_step: The step that wrote its rows; `NEVER` if there is none.
    """

    rows: Tensor
    step: int
    kept: Tensor | None = None
    kept_step: int = NEVER

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
        frozen: The snapshot, if there is one.
        frozen_step: The step that wrote its rows.
    """

    rows: Tensor
    step: int
    frozen: Tensor | None = None
    frozen_step: int = NEVER

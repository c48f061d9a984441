"""A history as it goes into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

NEVER = -1


@dataclass(frozen=True, slots=True)
class SavedGradients:
    """Gradients that wait for the next step.

    Attributes:
        outputs: Of a linear layer's outputs, `[num_nodes, *]`, in plan order.
        halos: For each chunk positions and gradients of its halo, `[num_halo]`, `[num_halo, *]`.
        scale: What waits is given so many times.
    """

    outputs: Tensor | None = None
    halos: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """One history between two steps.

    Attributes:
        rows: `[num_nodes, *]`, in plan order.
        step: The step that wrote them.
        kept: What a rule keeps beside them, `[num_nodes, *]`.
        kept_step: The step that wrote its rows; `NEVER` where it has no step's rows.
        gradients: What waits for the next step.
    """

    rows: Tensor
    step: int
    kept: Tensor | None = None
    kept_step: int = NEVER
    gradients: SavedGradients | None = None

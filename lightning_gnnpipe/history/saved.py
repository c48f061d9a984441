"""A history as it goes into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

NEVER = -1
HaloGradients = Mapping[int, tuple[Tensor, Tensor]]


class Adapted(NamedTuple):
    """How gradients of a history have been found.

    Attributes:
        correlation: Of those of a step with those before, averaged; None before the first.
        is_noisy: Whether it has asked for the rule for noisy ones.
        num_steps: Pipelined steps after the last that was measured.
    """

    correlation: float | None
    is_noisy: bool
    num_steps: int


@dataclass(frozen=True, slots=True)
class SavedGradients:
    """Gradients that wait for the next step.

    Attributes:
        outputs: Of a linear layer's outputs, `[num_nodes, *]`, in plan order.
        halos: For each chunk positions and gradients of its halo, `[num_halo]`, `[num_halo, *]`.
        last_outputs: The gradients of the last step as they came, where they are kept.
        last_halos: Likewise.
        scale: What waits is given so many times, of halos.
        output_scale: Likewise, of outputs.
        adapted: What has been measured, where it is.
    """

    outputs: Tensor | None = None
    halos: HaloGradients = field(default_factory=dict)
    last_outputs: Tensor | None = None
    last_halos: HaloGradients = field(default_factory=dict)
    scale: float = 1.0
    output_scale: float = 1.0
    adapted: Adapted | None = None


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

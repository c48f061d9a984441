"""The weights of the step before, which those of a step are carried forward from."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class LastWeights:
    """What the last step in chunks began with; empty after an exact one.

    Attributes:
        values: Its weights, by the name of the parameter.
        steps: Of those, by how much they differed from the weights of the step before it.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget them."""
        self.values, self.steps = {}, {}

"""The weights of the step before, which those of a step are carried forward from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class LastWeights:
    """What the last step in chunks began with; empty after an exact one.

    Attributes:
        values: Its weights, by the name of the parameter.
        steps: Of those, by how much they differed from the weights of the step before it.
        written: Parameters that the module writes to while it computes; they are left as they are.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def clear(self) -> None:
        """Forget them."""
        self.values, self.steps = {}, {}

    def exclude(self, names: Iterable[str]) -> None:
        """Have parameters that were written to stay as they are from now on."""
        for name in names:
            self.written.add(name)
            self.values.pop(name, None)
            self.steps.pop(name, None)

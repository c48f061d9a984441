"""What a training step is made of: layers, and values that stages compute again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lightning_gnnpipe.stages import Layers, Stage, repeat_costs, solve_balance


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer's share of a training step over all nodes.

    Attributes:
        forward_s: Seconds, forward.
        backward_s: Seconds, backward.
        saved_bytes: What autograd keeps between them.
        history_bytes: Its histories and gradient buffers, where chunks see each other.
        pushed_row_bytes: Bytes of one node's row in all of its histories.
        num_pushes: Its histories: how often it pushes the rows of a chunk.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    history_bytes: int
    pushed_row_bytes: int
    num_pushes: int

    @property
    def compute_s(self) -> float:
        """Seconds, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a training step over all nodes is made of.

    Attributes:
        layers: What each layer costs.
        repeats: What it costs to compute a value again that stages can, by its name.
    """

    layers: tuple[LayerCost, ...]
    repeats: dict[str, LayerCost]

    def of(self, stage: Stage) -> list[LayerCost]:
        """Return the costs of all that `stage` computes."""
        again = [name for part in stage.repeated for name in part.outputs]
        return [
            *(self.layers[segment.index] for segment in stage.segments),
            *(self.repeats[name] for name in again),
        ]

    def deal_out(
        self, layers: Layers, num_stages: int, repeated: Collection[str]
    ) -> tuple[int, ...]:
        """Return how many layers each stage gets for the slowest one to be as fast as possible."""
        again = {name: cost.compute_s for name, cost in self.repeats.items()}
        costs = [cost.compute_s for cost in self.layers]
        return solve_balance(costs, num_stages, repeat_costs(layers, repeated, again))

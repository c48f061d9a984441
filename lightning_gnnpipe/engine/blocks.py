"""Blocks of layers that go back at the same time, each with what the next found a step before."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import accumulate

from lightning_gnnpipe.history import LateGradients
from lightning_gnnpipe.stages import Layers, solve_balance

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a model, and what they have for each other.

    Attributes:
        cuts: The layers behind which there is another block: the number of its first.
        layers: The layers.
        late: What waits.
    """

    cuts: tuple[int, ...]
    layers: Layers
    late: LateGradients

    def crossing(self, cut: int) -> list[str]:
        """Return the names of what needs a gradient of all that is handed on at `cut`."""
        values = self.layers.values
        return [name for name in self.layers.crossing[cut] if values[name].requires_grad]


def block_sizes(num_layers: int, num_blocks: int) -> tuple[int, ...]:
    """Return how many layers each block has: they are alike but for one layer."""
    return solve_balance([1.0] * num_layers, min(num_blocks, num_layers))


def block_cuts(num_layers: int, num_blocks: int) -> tuple[int, ...]:
    """Return the first layer of each block but the first one."""
    return tuple(accumulate(block_sizes(num_layers, num_blocks)[:-1]))


def whole_blocks(num_layers: int, num_blocks: int, num_stages: int) -> tuple[int, ...] | None:
    """Return how many layers each stage gets if it gets whole blocks; None if there are too few."""
    if num_stages > min(num_blocks, num_layers):
        return None
    sizes = block_sizes(num_layers, num_blocks)
    parts = iter(sizes)
    counts = solve_balance(sizes, num_stages)
    return tuple(sum(next(parts) for _ in range(count)) for count in counts)


def warn_of_shared(num_blocks: int, num_stages: int) -> None:
    """Say that stages of the same block do not go back at the same time."""
    log.warning(
        "num_blocks=%d and %d stages: from stages that go back at the same time to some that wait "
        "for the next, since they share a block. With BlockGradients(num_blocks=%d) none waits, "
        "and the gradients of the first layers are older.",
        num_blocks,
        num_stages,
        num_stages,
    )

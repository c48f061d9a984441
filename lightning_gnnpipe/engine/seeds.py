"""Seeds of passes: a pass draws the same random numbers whatever the number of stages."""

from __future__ import annotations

from torch import nn

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.agree import Progress
from lightning_gnnpipe.engine.chunk_run import SeedOf, make_seeds


class PassSeeds:
    """The seeds of a run.

    Args:
        seed: Of the run.
        transport: The ranks.
        progress: Where the run is.
        module: The pipelined module.

    Attributes:
        num_inferences: Passes without gradients that drew random numbers.
    """

    def __init__(
        self, seed: int, transport: Transport, progress: Progress, module: nn.Module
    ) -> None:
        self._seed, self._transport, self._progress = seed, transport, progress
        self._module = module
        self.num_inferences = 0
        self._last_step, self._num_passes = -1, 0

    def of_training(self) -> SeedOf:
        """Begin a training pass and return its seeds."""
        transport = self._transport
        step = self._progress.step_index
        self._num_passes = self._num_passes + 1 if step == self._last_step else 0
        self._last_step = step
        # A second pass in a step draws others, by numbers that no step has.
        seeds = self._make(self._seed, step - (self._num_passes << 40))
        transport.begin_step(seeds(transport.world.rank, -1))
        return seeds

    def of_inference(self) -> SeedOf | None:
        """Begin a pass without gradients and return its seeds; None if dropout is off."""
        if not self._module.training:
            return None
        self.num_inferences += 1
        return self._make(~self._seed, self.num_inferences)

    def _make(self, seed: int, number: int) -> SeedOf:
        mesh = self._transport.mesh
        return make_seeds(seed, number, mesh.shard, mesh.replica)

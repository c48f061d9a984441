"""The ranks, and the device mesh `pipe x graph` that they are dealt out to.

    rank = stage * num_shards + shard        ranks of one stage are neighbours

A rank holds some layers (its stage) of some nodes (its shard). Along the pipe axis activations of
chunks travel, along the graph axis rows of neighbouring nodes. The `World` is there from the start;
the `Mesh` is made once the layout is known, which may need a look at the model and the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, and which one this is.

    Attributes:
        rank: This rank, from 0.
        size: Ranks.
        device: Where tensors live.
        timeout: Longest wait for another rank.
        wire: Where tensors must be to be sent; None for `device`.
    """

    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    wire: torch.device | None = None

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks to talk to."""
        return self.size > 1

    @property
    def wire_device(self) -> torch.device:
        """Where tensors must be to be sent."""
        return self.device if self.wire is None else self.wire


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place among stages and shards.

    Attributes:
        rank: This rank, from 0.
        num_stages: Stages, S: size of the pipe axis.
        num_shards: Shards of the graph, G: size of the graph axis.
        shards: The ranks of this stage; None for all ranks, or where there is one shard.
    """

    rank: int
    num_stages: int
    num_shards: int = 1
    shards: ProcessGroup | None = None

    @property
    def stage(self) -> int:
        """This rank's stage, from 0."""
        return self.rank // self.num_shards

    @property
    def shard(self) -> int:
        """This rank's shard, from 0."""
        return self.rank % self.num_shards

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.stage == self.num_stages - 1

    def rank_of(self, stage: int, shard: int | None = None) -> int:
        """Return the rank of a stage and a shard; without one, of this rank's shard."""
        return stage * self.num_shards + (self.shard if shard is None else shard)


def make_mesh(world: World, num_stages: int, num_shards: int) -> Mesh:
    """Return the mesh of `num_stages` x `num_shards` ranks; a collective call."""
    assert num_stages * num_shards == world.size
    mesh = Mesh(world.rank, num_stages, num_shards)
    if num_stages == 1 or num_shards == 1:
        return mesh
    groups = [
        dist.new_group(
            [mesh.rank_of(stage, shard) for shard in range(num_shards)], timeout=world.timeout
        )
        for stage in range(num_stages)  # every rank makes all of them, in the same order
    ]
    return Mesh(world.rank, num_stages, num_shards, groups[mesh.stage])

"""The device mesh `pipe x graph`: a rank holds some layers (its stage) of some nodes (its shard).

    rank = stage * num_shards + shard        ranks of one stage are neighbours

Along the pipe axis activations of chunks travel, along the graph axis rows of neighbouring nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from lightning_gnnpipe._compat_torch import set_group_timeout


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place.

    Attributes:
        rank: This rank, from 0.
        num_stages: Stages, S: size of the pipe axis.
        device: Where tensors live.
        timeout: Longest wait for another rank.
        wire: Where tensors must be to be sent; None for `device`.
        num_shards: Shards of the graph, G: size of the graph axis.
        shards: The ranks of this stage; None for all ranks, or where there is one shard.
    """

    rank: int
    num_stages: int
    device: torch.device
    timeout: timedelta
    wire: torch.device | None = None
    num_shards: int = 1
    shards: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks."""
        return self.num_stages * self.num_shards

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

    def rank_of(self, stage: int, shard: int | None = None) -> int:
        """Return the rank of a stage and a shard; without one, of this rank's shard."""
        return stage * self.num_shards + (self.shard if shard is None else shard)


def make_shard_group(
    num_stages: int, num_shards: int, wire: torch.device, timeout: timedelta
) -> ProcessGroup | None:
    """Return the group of this rank's stage, if it is not all ranks; a collective call."""
    if num_shards == 1 or num_stages == 1:
        return None
    mesh = init_device_mesh(wire.type, (num_stages, num_shards), mesh_dim_names=("pipe", "graph"))
    group = mesh.get_group("graph")
    set_group_timeout(timeout, group)
    return group

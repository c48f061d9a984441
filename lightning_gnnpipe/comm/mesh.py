"""The device mesh `data x pipe x graph`, and the place of this rank in it.

    rank = (replica * num_stages + stage) * num_shards + shard     ranks of one stage are neighbours

A rank holds the layers of its stage, for the nodes of its shard and the batches of its replica.
Activations of chunks travel along the pipe axis, rows of neighbouring nodes along the graph axis,
gradients along the data axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class World:
    """All ranks, and this one.

    `timeout` is the longest wait for another rank; `num_replicas` is R, the size of the data axis.
    """

    rank: int
    size: int
    device: torch.device
    timeout: timedelta
    wire: torch.device | None = None
    num_replicas: int = 1

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    @property
    def wire_device(self) -> torch.device:
        """Device that messages are sent from and received on."""
        return self.device if self.wire is None else self.wire

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.size // self.num_replicas


@dataclass(frozen=True, slots=True)
class Members:
    """Ranks that communicate, ascending, including this one; torch.distributed owns `group`."""

    ranks: Sequence[int]
    group_ref: ref[ProcessGroup] | None = None

    @property
    def group(self) -> ProcessGroup | None:
        """The process group; None for the default group, or if this rank is alone."""
        if self.group_ref is None:
            return None
        group = self.group_ref()
        assert group is not None, "the process groups were destroyed"
        return group


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place among `num_stages` (S), `num_shards` (G) and `num_replicas` (R).

    Attributes:
        shards: The ranks of this stage of this replica.
        own_replica: The ranks of this replica.
        replicas: The ranks of this stage and shard in all replicas.
        asked: As `replicas`, in a separate process group for calls that user code requests.
    """

    rank: int
    num_stages: int
    num_shards: int = 1
    num_replicas: int = 1
    shards: Members = Members(())
    own_replica: Members = Members(())
    replicas: Members = Members(())
    everyone: Members = Members(())
    asked: Members = Members(())

    @property
    def replica(self) -> int:
        """This rank's replica, from 0."""
        return self.rank // (self.num_stages * self.num_shards)

    @property
    def stage(self) -> int:
        """This rank's stage, from 0."""
        return self.rank // self.num_shards % self.num_stages

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
        """Return the rank of a stage and shard, by default this shard, in this replica."""
        first = self.replica * self.num_stages * self.num_shards
        return first + stage * self.num_shards + (self.shard if shard is None else shard)


def make_mesh(world: World, num_stages: int, num_shards: int) -> Mesh:
    """Create the mesh and its process groups; a collective call."""
    assert num_stages * num_shards == world.replica_size
    ranks = torch.arange(world.size).view(world.num_replicas, num_stages, num_shards)
    everyone = _own(world, [list(range(world.size))])
    replicas = ranks.flatten(1).t().tolist()
    return replace(
        Mesh(world.rank, num_stages, num_shards, world.num_replicas),
        shards=_own(world, ranks.flatten(0, 1).tolist(), everyone),
        own_replica=_own(world, ranks.flatten(1).tolist(), everyone),
        replicas=_own(world, replicas, everyone),
        everyone=everyone,
        asked=_own(world, replicas),
    )


def _own(world: World, parts: Sequence[Sequence[int]], everyone: Members | None = None) -> Members:
    """Return the part that has this rank, with a new process group if it has several ranks."""
    [own] = [ranks for ranks in parts if world.rank in ranks]
    if len(parts) == 1 and everyone is not None:
        return everyone
    if len(own) == 1 or not dist.is_initialized():
        return Members(own)
    # torch.distributed requires that every rank creates all groups, in the same order.
    groups = [dist.new_group(list(ranks), timeout=world.timeout) for ranks in parts]
    return Members(own, ref(groups[parts.index(own)]))

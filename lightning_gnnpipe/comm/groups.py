"""The device mesh `data x pipe x graph`, the place of this rank in it, and process groups.

Ranks of one stage are neighbours: rank = (replica * num_stages + stage) * num_shards + shard.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_gnnpipe._compat_torch import default_store
from lightning_gnnpipe.errors import ConfigError, Fallbacks

_made: list[ref[ProcessGroup]] = []  # the default group, if the package created it
_broken: list[Store | None] = []  # of each failure so far; None if the other ranks have ended
log = logging.getLogger(__name__)
GPU_BACKEND = "cpu:gloo,cuda:nccl"  # gloo for CPU tensors, NCCL for GPU tensors


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
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    @property
    def wire_device(self) -> torch.device:
        """Device that messages are sent from and received on."""
        return self.device if self.wire is None else self.wire

    @property
    def replica_size(self) -> int:
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

    It holds the layers of its stage, for the nodes of its shard and the batches of its replica.
    """

    rank: int
    num_stages: int
    num_shards: int = 1
    num_replicas: int = 1

    @property
    def replica(self) -> int:
        return self.rank // (self.num_stages * self.num_shards)

    @property
    def stage(self) -> int:
        return self.rank // self.num_shards % self.num_stages

    @property
    def shard(self) -> int:
        return self.rank % self.num_shards

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def rank_of(self, stage: int, shard: int | None = None) -> int:
        """Return the rank of a stage and shard, by default this shard, in this replica."""
        first = self.replica * self.num_stages * self.num_shards
        return first + stage * self.num_shards + (self.shard if shard is None else shard)


class Axes(NamedTuple):
    """The ranks that this one communicates with, along each axis of the mesh."""

    replica: Members  # all of this replica
    everyone: Members
    shards: Members  # of this stage of this replica
    pipe: Members  # of this shard of this replica
    replicas: Members  # of this stage and shard in all replicas
    asked: Members  # as `replicas`, in a process group of its own for what user code requests

    @property
    def groups(self) -> list[ProcessGroup]:
        """The process groups of this rank that the package made."""
        found = [one.group for one in self if len(one.ranks) > 1]
        if _is_ours():
            found.append(dist.group.WORLD)
        return [one for one in dict.fromkeys(found) if one is not None]


def make_axes(world: World, mesh: Mesh) -> Axes:
    """Create the process groups; a collective call."""
    ranks = torch.arange(world.size).view(world.num_replicas, mesh.num_stages, mesh.num_shards)
    everyone = _own(world, [list(range(world.size))])
    replica = _own(world, ranks.flatten(1).tolist(), everyone)
    replicas = ranks.flatten(1).t().tolist()
    pipes = ranks.transpose(1, 2).flatten(0, 1).tolist()
    return Axes(
        replica,
        everyone,
        shards=_own(world, ranks.flatten(0, 1).tolist(), everyone),
        pipe=replica if mesh.num_shards == 1 else _own(world, pipes, everyone),
        replicas=_own(world, replicas, everyone),
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


def end_groups_at_exit(*, is_new: bool) -> None:
    """Destroy process groups at exit if the package created the default group, now or before."""
    if is_new:
        assert dist.group.WORLD is not None
        _made[:] = [ref(dist.group.WORLD)]
    if _is_ours():
        atexit.unregister(_end_groups)
        atexit.register(_end_groups)


def abandon_groups(*, ends_ranks: bool = False) -> None:
    """Skip the teardown at exit: threads of the broken groups may wait for failed ranks."""
    atexit.unregister(_end_groups)
    if _is_ours():
        _broken.append(None if ends_ranks else default_store())
        _made.clear()


def store_after_failure() -> Store | None:
    """Return a store in which the ranks find each other again, without the groups that broke.

    None if no group of the package has broken since.
    """
    if not _broken or _made or not dist.is_initialized():
        return None
    store = _broken[-1]
    if store is None:
        raise ConfigError(
            expected="the processes of the last run",
            found="none, since Ctrl+C has ended them",
            remedy='Run the script again, with trainer.fit(..., ckpt_path="last") to go on.',
        )
    dist.destroy_process_group()
    return PrefixStore(f"after_failure_{len(_broken)}", store)


def _end_groups() -> None:
    if dist.is_initialized() and _is_ours():
        dist.destroy_process_group()


def _is_ours() -> bool:
    return any(one() is dist.group.WORLD for one in _made)


def restart_store(address: str, port: int, timeout: timedelta) -> Store | None:
    """Return a store for this restart of torchrun; None if no new store is needed.

    With its static rendezvous torchrun keeps one store over restarts. It still holds the addresses
    of ranks that have ended, and new ranks would wait for them. Only on one node, because torchrun
    counts restarts per node; on several, ``--rdzv-backend=c10d`` creates a new store for each.
    """
    world_size = os.environ.get("WORLD_SIZE", "")
    is_one_node = world_size == os.environ.get("LOCAL_WORLD_SIZE")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_one_node:
        return None
    store = TCPStore(address, port, int(world_size), is_master=False, timeout=timeout)
    return PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def choose_wire(device: torch.device, backend: str) -> torch.device:
    """Return the device that messages are sent from; a collective call on the default group.

    NCCL refuses two ranks on one GPU. `cuda:0` of two processes can be different GPUs, so ranks
    compare names of GPUs through gloo.
    """
    if backend == "gloo":
        return torch.device("cpu")
    if device.type != "cuda" or backend != GPU_BACKEND:  # the latter: chosen by the user
        return device
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, gpu_name(device))
    crowded = next((gpu for gpu in found if found.count(gpu) > 1), None)
    if crowded is None:
        return device
    shared = [rank for rank, gpu in enumerate(found) if gpu == crowded]
    Fallbacks(log, is_quiet=dist.get_rank() != 0).tell(
        "Messages go through the CPU by gloo, since ranks %s share a GPU, which NCCL does not "
        "support.",
        " and ".join(map(str, shared)),
    )
    return torch.device("cpu")


def gpu_name(device: torch.device) -> str:
    """Return a name of the GPU that is unique in the job."""
    index = torch.cuda.current_device() if device.index is None else device.index
    unique = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if unique is None:  # torch before 2.5: number among the visible GPUs
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        unique = visible[index] if index < len(visible) and visible[index] else index
    return f"{socket.gethostname()}/{unique}"

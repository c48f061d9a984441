"""Collective calls of some ranks: waits are bounded, and every byte is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnnpipe.comm.mesh import Members, World
from lightning_gnnpipe.comm.meter import Meter
from lightning_gnnpipe.errors import PeerError
from lightning_gnnpipe.types import TrafficKind

T = TypeVar("T")


class Collectives:
    """What some ranks do together. With one rank, nothing is sent.

    Args:
        world: All ranks.
        meter: Counts what travels.
        members: The ranks that take part; None for all.
    """

    def __init__(self, world: World, meter: Meter, members: Members | None = None) -> None:
        self.world = world
        self.meter = meter
        self.members = Members(range(world.size)) if members is None else members

    @property
    def has_others(self) -> bool:
        """Whether other ranks take part."""
        return len(self.members.ranks) > 1

    def broadcast(self, tensor: Tensor, source: int, kind: TrafficKind) -> None:
        """Overwrite `tensor` by that of rank `source`."""
        if not self.has_others:
            return
        with self.explained(f"broadcast {kind} data from rank {source}"):
            payload = self._on_wire(tensor)
            dist.broadcast(payload, source, group=self.members.group)
            bring(payload, tensor)
        if self.world.rank != source:
            self.meter.count(kind, tensor)

    def all_reduce(self, tensor: Tensor, kind: TrafficKind) -> None:
        """Sum `tensor` over the ranks, in place."""
        if self.has_others:
            self._sum(tensor, kind, self.members.group)

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, each a list of as many 64-bit integers."""
        if not self.has_others:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64, device=self.world.wire_device)
        all_numbers = [torch.empty_like(own) for _ in self.members.ranks]
        with self.explained("compare the batch with the other ranks"):
            dist.all_gather(all_numbers, own, group=self.members.group)
        self.meter.count("control", *all_numbers)
        return [one.tolist() for one in all_numbers]

    def barrier(self) -> None:
        """Wait until all of the ranks are here."""
        with self.explained("meet the other ranks"):
            # dist.barrier() would choose between backends by itself.
            met = torch.zeros(1, device=self.world.wire_device)
            dist.all_reduce(met, group=self.members.group)
            met.item()

    def broadcast_object(self, value: T, source: int | None = None) -> T:
        """Return the picklable `value` of rank `source`; of the first one if that is None."""
        if not self.has_others:
            return value
        box, group = [value], self.members.group
        source = self.members.ranks[0] if source is None else source
        with self.explained(f"broadcast from rank {source}"):
            dist.broadcast_object_list(box, source, group, self.world.wire_device)
        return box[0]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank alone; return its result, or raise its error, on all."""
        result: T | None = None
        error: Exception | None = None
        if self.world.rank == self.members.ranks[0]:
            try:
                result = work()
            except ValueError as found:
                error = found
        result, error = self.broadcast_object((result, error))
        if error is not None:
            raise error
        return cast(T, result)

    def all_gather_objects(self, value: T) -> list[T]:
        """Return the picklable values of the ranks, in their order."""
        if not self.has_others:
            return [value]
        values: list[Any] = [None] * len(self.members.ranks)
        with self.explained("gather from all ranks"):
            dist.all_gather_object(values, value, group=self.members.group)
        return values

    def over(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        work: Callable[[Tensor, dist.ProcessGroup | None], T],
    ) -> T:
        """Return what `work`, which talks by itself, makes of `tensor` over the ranks.

        Args:
            tensor: This rank's; it is returned if there are no others.
            group: Ranks to use instead; None, or that of all ranks, for none.
            work: Is given the tensor, as it can be sent, and a group; None for all ranks.
        """
        chosen = self.members.group if group in (None, dist.group.WORLD) else group
        if chosen is None and not self.has_others:
            return cast(T, tensor)
        with self.explained("put a tensor together with other ranks"):
            found: Any = work(tensor.to(self.world.wire_device), chosen)
        if isinstance(found, Tensor):
            return cast(T, found.to(tensor.device))
        return cast(T, [one.to(tensor.device) for one in found])

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or a copy of it, as it can be sent."""
        return tensor.detach().to(self.world.wire_device).contiguous()

    def _sum(self, tensor: Tensor, kind: TrafficKind, group: dist.ProcessGroup | None) -> None:
        with self.explained(f"sum {kind} data over ranks"):
            payload = self._on_wire(tensor)
            dist.all_reduce(payload, group=group)
            bring(payload, tensor)
        self._count_sum(tensor.nbytes, kind, group)

    def _count_sum(
        self, num_bytes: int, kind: TrafficKind, group: dist.ProcessGroup | None
    ) -> None:
        """Count this rank's part of what a ring of n receives for a sum: 2 (n - 1) times it."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        total = 2 * (size - 1) * num_bytes
        self.meter.count_bytes(kind, total * (rank + 1) // size - total * rank // size)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(
                f"Rank {self.world.rank} could not {what}: another rank has failed, or did not "
                f"answer within {self.world.timeout.total_seconds():.0f} s. The first error that a "
                "rank printed is the cause. If all ranks are alive and slow, give GNNPipeStrategy "
                f"a longer timeout. ({type(error).__name__}: {error})"
            ) from error


def bring(place: Tensor, target: Tensor) -> None:
    """Copy to `target` what has come in at `place`, if they are not the same."""
    if place.data_ptr() != target.data_ptr() or place.device != target.device:
        target.detach().copy_(place)

"""Collective calls of some ranks: waits are bounded, and every byte is counted.

The package has process groups of its own, so that none of its calls pairs with one of the user's or
of Lightning's. Before a call between steps ranks meet: each says what it is about to do, and all
refuse if that differs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnnpipe.comm.mesh import Members, World
from lightning_gnnpipe.comm.meter import Meter
from lightning_gnnpipe.comm.watch import Watch, differ
from lightning_gnnpipe.errors import GNNPipeError, PeerError
from lightning_gnnpipe.types import TrafficKind

T = TypeVar("T")

_NUM_NUMBERS, _TEXT = 8, "64s"  # of a meeting: one size for all, or gloo would mix them up
UNKNOWN_BYTES = 1 << 40  # of objects, and of work that waits now and then
_LOST = re.compile(r"gloo|NCCL|[Cc]onnect|[Tt]im(ed|e) ?out|[Ss]ocket|Broken pipe")


class Collectives:
    """What some ranks do together. With one rank, nothing is sent.

    Args:
        world: All ranks.
        meter: Counts what travels.
        members: The ranks that take part; None for all.
        watch: Over what this rank waits for; None for one that does nothing.

    Attributes:
        answers: What the other ranks do if one asks for something in a meeting, by its text. It is
            called with the texts of all ranks, and they meet again.
    """

    def __init__(
        self,
        world: World,
        meter: Meter,
        members: Members | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.world = world
        self.meter = meter
        self.watch = Watch(world.rank, world.size) if watch is None else watch
        self.members = Members(range(world.size)) if members is None else members
        self.answers: dict[str, Callable[[Sequence[str]], None]] = {}

    @property
    def has_others(self) -> bool:
        """Whether other ranks take part."""
        return len(self.members.ranks) > 1

    def broadcast(self, tensor: Tensor, source: int, kind: TrafficKind) -> None:
        """Overwrite `tensor` by that of rank `source`."""
        if not self.has_others:
            return
        payload = self._on_wire(tensor)
        with self.explained(f"broadcast {kind} data from rank {source}", payload.nbytes):
            dist.broadcast(payload, source, group=self.members.group)
        bring(payload, tensor)
        if self.world.rank != source:
            self.meter.count(kind, tensor)

    def all_reduce(self, tensor: Tensor, kind: TrafficKind) -> None:
        """Sum `tensor` over the ranks, in place."""
        if self.has_others:
            self._sum(tensor, kind, self.members.group)

    def meet(self, what: str, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Wait until all of the ranks are here, to do the same; return the numbers of each.

        Args:
            what: Follows "wants to"; ASCII, of which 64 characters are compared.
            numbers: Up to 8 integers of 64 bits, as many on each rank.

        Raises:
            UnsupportedError: If another rank is about to do something else.
        """
        texts, ranks = self.gather(what, numbers)
        while asked := self.answers.keys() & set(texts):
            self.answers[asked.pop()](texts)
            texts, ranks = self.gather(what, numbers)
        if len(set(texts)) > 1:
            raise differ(texts, self.members.ranks)
        return ranks

    def gather(self, what: str, numbers: Sequence[int] = ()) -> tuple[list[str], list[list[int]]]:
        """Return what each rank is about to do, and its numbers; for the arguments see `meet`."""
        if not self.has_others:
            return [what], [list(numbers)]
        assert len(numbers) <= _NUM_NUMBERS
        text = struct.unpack("<8q", struct.pack(_TEXT, what.encode()))
        padding = [0] * (_NUM_NUMBERS - len(numbers))
        device = self.world.wire_device
        own = torch.tensor([*text, *numbers, *padding], dtype=torch.int64, device=device)
        found = [torch.empty_like(own) for _ in self.members.ranks]
        with self.explained(what):
            dist.all_gather(found, own, group=self.members.group)
            ranks = [one.tolist() for one in found]
        self.meter.count("control", *found)
        texts = [
            struct.pack("<8q", *one[:8]).rstrip(b"\0").decode(errors="replace") for one in ranks
        ]
        return texts, [one[8 : 8 + len(numbers)] for one in ranks]

    def broadcast_object(self, value: T, source: int | None = None) -> T:
        """Return the picklable `value` of rank `source`; of the first one if that is None."""
        if not self.has_others:
            return value
        box, group = [value], self.members.group
        source = self.members.ranks[0] if source is None else source
        what = f"broadcast from rank {source}"
        self.meet(what)
        with self.explained(what, UNKNOWN_BYTES):
            dist.broadcast_object_list(box, source, group, self.world.wire_device)
        return box[0]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank alone; return its result on all.

        Raises:
            GNNPipeError: On all ranks, if `work` raises it.
            PeerError: On the others, if `work` raises another one on the first.
        """
        result: T | None = None
        error: Exception | None = None
        if self.world.rank == self.members.ranks[0]:
            try:
                result = work()
            except Exception as found:
                error = found
        shared = error if isinstance(error, GNNPipeError) else cause_of(error)
        result, told = self.broadcast_object((result, shared))
        if error is None and isinstance(told, str):
            raise PeerError(f"Rank {self.members.ranks[0]} failed: {told}")
        if error is not None or isinstance(told, Exception):
            raise cast(Exception, error or told)
        return cast(T, result)

    def all_gather_objects(self, value: T) -> list[T]:
        """Return the picklable values of the ranks, in their order."""
        if not self.has_others:
            return [value]
        values: list[Any] = [None] * len(self.members.ranks)
        what = "gather from all ranks"
        self.meet(what)
        with self.explained(what, UNKNOWN_BYTES):
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
        sent = tensor.to(self.world.wire_device)
        with self.explained("put a tensor together with other ranks", sent.nbytes):
            found: Any = work(sent, chosen)
        if isinstance(found, Tensor):
            return cast(T, found.to(tensor.device))
        return cast(T, [one.to(tensor.device) for one in found])

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or a copy of it, as it can be sent."""
        return tensor.detach().to(self.world.wire_device).contiguous()

    def _sum(self, tensor: Tensor, kind: TrafficKind, group: dist.ProcessGroup | None) -> None:
        payload = self._on_wire(tensor)
        with self.explained(f"sum {kind} data over ranks", payload.nbytes):
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
    def explained(self, what: str, num_bytes: int = 0) -> Iterator[None]:
        """Wait for other ranks within the block, and give the cause if that fails.

        An error of this rank's own passes.

        Args:
            what: What this rank does; follows "could not".
            num_bytes: That may be on their way.

        Raises:
            PeerError: If another rank has failed, or has not answered in time.
            UnsupportedError: If the ranks wait for each other.
        """
        with self.watch.waiting(what, num_bytes):
            try:
                yield
            except (RuntimeError, TimeoutError) as error:
                if not is_lost(error):
                    raise
                cause = self.watch.cause()
                if cause is not None:
                    raise cause from None
                raise PeerError(
                    f"Rank {self.world.rank} could not {what}: another rank has failed, or did not "
                    f"answer within {self.world.timeout.total_seconds():.0f} s. The first error "
                    "that a rank printed is the cause. If all ranks are alive and slow, give "
                    f"GNNPipeStrategy a longer timeout. ({type(error).__name__}: {error})"
                ) from error


def is_lost(error: BaseException) -> bool:
    """Whether `error` tells of the way to another rank, not of this rank's own work."""
    if isinstance(error, TimeoutError | dist.DistError):
        return True
    return type(error) is RuntimeError and _LOST.search(str(error)) is not None


def cause_of(error: BaseException | None) -> str | None:
    """Return what to tell other ranks of `error`."""
    return None if error is None else f"{type(error).__name__}: {error}"


def bring(place: Tensor, target: Tensor) -> None:
    """Copy to `target` what has come in at `place`, if they are not the same."""
    if place.data_ptr() != target.data_ptr() or place.device != target.device:
        target.detach().copy_(place)

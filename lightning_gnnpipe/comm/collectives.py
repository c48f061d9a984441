"""Collective calls between ranks, with bounded waits and a count of all bytes.

They use process groups of the package, so that none pairs with a call of the user or of Lightning.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnnpipe.comm.groups import Members, World
from lightning_gnnpipe.comm.watch import Watch
from lightning_gnnpipe.errors import GNNPipeError, PeerError, UnsupportedError
from lightning_gnnpipe.types import TrafficKind

T = TypeVar("T")

_NUM_NUMBERS, _TEXT = 8, "64s"  # of a meeting; fixed, since gloo cannot match different sizes
_LOST = re.compile(
    r"gloo|NCCL|[Cc]onnection (closed|reset|refused|timed out)|pair closure|Broken pipe"
    r"|Timed out waiting|Operation timed out"
)


class Meter(Counter[str]):
    """Bytes received in a step, by kind; `control` is all but the payload of steps."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the block."""
        before = dict(self)
        try:
            yield
        finally:
            self.clear()
            self.update(before)


class Collectives:
    """Collective calls over `members`. With one rank, nothing is sent."""

    def __init__(self, world: World, meter: Meter, members: Members, watch: Watch) -> None:
        self.world, self.meter, self.members, self.watch = world, meter, members, watch

    @property
    def has_others(self) -> bool:
        return len(self.members.ranks) > 1

    def broadcast(self, tensor: Tensor, source: int, kind: TrafficKind) -> None:
        """Overwrite `tensor` with rank `source`'s tensor."""
        if not self.has_others:
            return
        payload = self._on_wire(tensor)
        with self.explained(f"broadcast {kind} data from rank {source}"):
            dist.broadcast(payload, source, group=self.members.group)
        bring(payload, tensor)
        if self.world.rank != source:
            self.meter[kind] += tensor.nbytes

    def broadcast_all(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrite `tensors` by the tensors of rank `source`, in one message for each dtype.

        Sparse tensors stay as they are: their sizes may differ.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for one in tensors if self.has_others else ():
            if one.layout is torch.strided:
                by_dtype.setdefault(one.dtype, []).append(one)
        for several in by_dtype.values():
            flat = torch.cat([one.detach().flatten().to(self.world.device) for one in several])
            self.broadcast(flat.view(torch.uint8), source, "control")  # gloo lacks some dtypes
            parts = torch.split(flat, [one.numel() for one in several])
            for one, part in zip(several, parts, strict=True):
                if self.world.rank != source:  # autograd may have saved the source's
                    one.detach().copy_(part.view_as(one))

    def all_reduce(self, tensor: Tensor, kind: TrafficKind) -> None:
        """Sum `tensor` over the ranks, in place."""
        if not self.has_others:
            return
        payload = self._on_wire(tensor)
        with self.explained(f"sum {kind} data over ranks"):
            dist.all_reduce(payload, group=self.members.group)
        bring(payload, tensor)
        self._count_sum(tensor.nbytes, kind, self.members.group)

    def meet(self, what: str, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Wait for all ranks and return the numbers of each; raise if `what` differs between ranks.

        `what` follows "wants to": ASCII, cut to 64 characters. `numbers`: up to 8, of 64 bits.
        """
        if not self.has_others:
            return [list(numbers)]
        assert len(numbers) <= _NUM_NUMBERS
        text = struct.unpack("<8q", struct.pack(_TEXT, what.encode()))
        padding = [0] * (_NUM_NUMBERS - len(numbers))
        device = self.world.wire_device
        own = torch.tensor([*text, *numbers, *padding], dtype=torch.int64, device=device)
        found = [torch.empty_like(own) for _ in self.members.ranks]
        with self.explained(what):
            dist.all_gather(found, own, group=self.members.group)
            ranks = [one.tolist() for one in found]
        self.meter["control"] += len(found) * own.nbytes
        texts = [
            struct.pack("<8q", *one[:8]).rstrip(b"\0").decode(errors="replace") for one in ranks
        ]
        if len(set(texts)) > 1:
            raise _differ(texts, self.members.ranks)
        return [one[8 : 8 + len(numbers)] for one in ranks]

    def broadcast_object(self, value: T, source: int | None = None) -> T:
        """Return the picklable `value` of rank `source`, by default the first rank."""
        if not self.has_others:
            return value
        box, group = [value], self.members.group
        source = self.members.ranks[0] if source is None else source
        what = f"broadcast from rank {source}"
        self.meet(what)
        with self.explained(what):
            dist.broadcast_object_list(box, source, group, self.world.wire_device)
        return box[0]

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its result; if one fails, all do."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as found:
            error = found
        causes = zip(self.members.ranks, self.all_gather_objects(cause_of(error)), strict=True)
        failed = [f"Rank {rank} failed: {cause}" for rank, cause in causes if cause is not None]
        if error is None and failed:
            raise PeerError(failed[0])
        if error is not None:
            raise error
        return result

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank only; all ranks return its result or raise its error."""

        def run() -> T | GNNPipeError | None:
            try:
                return work() if self.world.rank == self.members.ranks[0] else None
            except GNNPipeError as error:  # the same on all ranks
                return error

        found = self.broadcast_object(self.together(run))
        if isinstance(found, GNNPipeError):
            raise found
        return cast(T, found)

    def all_gather_objects(self, value: T) -> list[T]:
        """Return the picklable values of all ranks, in rank order."""
        if not self.has_others:
            return [value]
        values: list[Any] = [None] * len(self.members.ranks)
        what = "gather from all ranks"
        self.meet(what)
        with self.explained(what):
            dist.all_gather_object(values, value, group=self.members.group)
        return values

    def gather_objects(self, value: T) -> list[T]:
        """Return the picklable values of all ranks on the first one, else this rank's own."""
        if not self.has_others:
            return [value]
        first, what = self.members.ranks[0], "gather to the first rank"
        is_first = self.world.rank == first
        values: list[Any] = [None] * len(self.members.ranks)
        self.meet(what)
        with self.explained(what):
            dist.gather_object(value, values if is_first else None, first, self.members.group)
        return values if is_first else [value]

    def over(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        work: Callable[[Tensor, dist.ProcessGroup | None], T],
    ) -> T:
        """Run the collective `work` on `tensor`, on the wire device; move the result back."""
        chosen = self.members.group if group in (None, dist.group.WORLD) else group
        if chosen is None and not self.has_others:
            return cast(T, tensor)
        sent = tensor.to(self.world.wire_device)
        with self.explained("reduce or gather a tensor"):
            found: Any = work(sent, chosen)
        if isinstance(found, Tensor):
            return cast(T, found.to(tensor.device))
        return cast(T, [one.to(tensor.device) for one in found])

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """Return `tensor` contiguous on the wire device, copied only if necessary."""
        return tensor.detach().to(self.world.wire_device).contiguous()

    def _count_sum(
        self, num_bytes: int, kind: TrafficKind, group: dist.ProcessGroup | None
    ) -> None:
        """Count this rank's part of the 2 (n - 1) `num_bytes` that a ring of n ranks receives."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        total = 2 * (size - 1) * num_bytes
        self.meter[kind] += total * (rank + 1) // size - total * rank // size

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Run a block that waits for other ranks; if that fails, raise the cause.

        Errors of this rank itself pass unchanged. `what` follows "could not".
        """
        self.watch.check()
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if not is_communication_error(error):
                raise
            self.watch.read()
            self.watch.check()
            raise PeerError(
                f"Rank {self.world.rank} could not {what}: another rank failed, or did not "
                f"answer within {self.world.timeout.total_seconds():.0f} s. Look for the "
                "first error that any rank printed. If there is none and all ranks are slow, "
                "set GNNPipeStrategy(timeout=...). "
                f"({type(error).__name__}: {error})"
            ) from error


def _differ(whats: Sequence[str], ranks: Sequence[int]) -> UnsupportedError:
    """Return the error for ranks that do different things; `whats` follow "wants to"."""
    pairs = zip(ranks, whats, strict=True)
    return UnsupportedError(
        expected="all ranks to make the same calls",
        found="; ".join(f"rank {rank} wants to {what}" for rank, what in pairs),
        remedy="Call the pipelined module, trainer.save_checkpoint and all functions that "
        "communicate on every rank, not under `if self.global_rank == 0`. Stop by "
        "trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False).",
    )


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` comes from communication, not from this rank's own work."""
    if isinstance(error, TimeoutError | dist.DistError):
        return True
    return type(error) is RuntimeError and _LOST.search(str(error)) is not None


def cause_of(error: BaseException | None) -> str | None:
    """Return type and text of `error`, to send to other ranks."""
    try:
        return None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # of the user's own __str__
        return type(error).__name__


def bring(place: Tensor, target: Tensor) -> None:
    """Copy the received payload `place` to `target`, unless they share memory."""
    if place.data_ptr() != target.data_ptr() or place.device != target.device:
        target.detach().copy_(place)

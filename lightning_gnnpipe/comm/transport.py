"""Messages between stages: sizes are known from the plan, waits are bounded, every byte is counted.

Receives are posted early, because gloo moves nothing before the peer has posted; sends are waited
for at the end of a phase, so both run while the stage computes. A tensor that is being sent is kept
alive until then. A tensor that is not where messages travel (see `wire`) is sent as a copy, and
received into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnnpipe.comm.mesh import Mesh
from lightning_gnnpipe.comm.meter import Meter
from lightning_gnnpipe.comm.parcel import Parcel
from lightning_gnnpipe.comm.payload import Codec
from lightning_gnnpipe.errors import PeerError
from lightning_gnnpipe.types import TrafficKind

T = TypeVar("T")

PLAIN = Codec()  # tensors as they are

_MAX_TENSORS = 1024
_EXCHANGE_TAG = 1  # ranks that exchange have no other messages, and gloo keeps their order


class Transport:
    """Point-to-point messages to the neighbouring stages, and collectives over all of them."""

    def __init__(self, mesh: Mesh, meter: Meter) -> None:
        self.mesh = mesh
        self.meter = meter
        self._sends: list[tuple[Any, Tensor]] = []
        self._receives: dict[tuple[TrafficKind, int], tuple[list[Any], list[Parcel]]] = {}
        self._seed = 0

    def begin_step(self, seed: int) -> None:
        """Draw the random numbers of codecs from `seed` on; each message takes the next one."""
        self._seed = seed

    def post_receive(
        self,
        source: int,
        kind: TrafficKind,
        chunk: int,
        buffers: Sequence[Tensor],
        codec: Codec = PLAIN,
    ) -> None:
        """Start to receive the tensors of `chunk` from rank `source` into `buffers`."""
        parcels = [Parcel(buffer, codec, self.mesh.wire_device) for buffer in buffers]
        with self.explained(f"receive {kind} data of chunk {chunk} from rank {source}"):
            works = [
                dist.irecv(parcel.place, source, tag=_tag(kind, chunk, i))
                for i, parcel in enumerate(parcels)
                if parcel.num_bytes
            ]
        self._receives[kind, chunk] = (works, parcels)

    def wait_receive(self, kind: TrafficKind, chunk: int) -> list[Tensor]:
        """Wait for the tensors of `chunk` and return them."""
        works, parcels = self._receives.pop((kind, chunk))
        with self.explained(f"wait for {kind} data of chunk {chunk}"):
            for work in works:
                work.wait(self.mesh.timeout)
        self.meter.count_bytes(kind, sum(parcel.num_bytes for parcel in parcels))
        return [parcel.open() for parcel in parcels]

    def send(
        self,
        target: int,
        kind: TrafficKind,
        chunk: int,
        tensors: Sequence[Tensor],
        codec: Codec = PLAIN,
    ) -> None:
        """Start to send the tensors of `chunk` to rank `target`."""
        with self.explained(f"send {kind} data of chunk {chunk} to rank {target}"):
            for i, tensor in enumerate(tensors):
                payload = self._encode(tensor, codec)
                if payload.numel():
                    work = dist.isend(payload, target, tag=_tag(kind, chunk, i))
                    self._sends.append((work, payload))

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        with self.explained("wait for sent data to be received"):
            for work, _ in self._sends:
                work.wait(self.mesh.timeout)
        self._sends.clear()

    def broadcast(self, tensor: Tensor, source: int, kind: TrafficKind) -> None:
        """Overwrite `tensor` by that of rank `source`."""
        if not self.mesh.is_distributed:
            return
        with self.explained(f"broadcast {kind} data from rank {source}"):
            payload = self._on_wire(tensor)
            dist.broadcast(payload, source)
            _bring(payload, tensor)
        if self.mesh.rank != source:
            self.meter.count(kind, tensor)

    def all_reduce(self, tensor: Tensor, kind: TrafficKind) -> None:
        """Sum `tensor` over all ranks, in place."""
        if self.mesh.is_distributed:
            self._sum(tensor, kind, None)

    def sum_over_shards(self, tensor: Tensor, kind: TrafficKind) -> None:
        """Sum `tensor` over the ranks of this stage, in place."""
        if self.mesh.num_shards > 1:
            self._sum(tensor, kind, self.mesh.shards)

    def start_sum_over_shards(
        self, tensor: Tensor, kind: TrafficKind, *, num_flags: int = 0
    ) -> Callable[[], None]:
        """Start to sum `tensor` over the ranks of this stage; return what waits for it.

        Its last `num_flags` elements count as control.
        """
        payload = self._on_wire(tensor)
        with self.explained(f"sum {kind} data over ranks"):
            work = dist.all_reduce(payload, group=self.mesh.shards, async_op=True)
        flag_bytes = num_flags * tensor.element_size()
        self._count_sum(tensor.nbytes - flag_bytes, kind, self.mesh.shards)
        self._count_sum(flag_bytes, "control", self.mesh.shards)

        def wait() -> None:
            with self.explained(f"sum {kind} data over ranks"):
                work.wait(self.mesh.timeout)
            _bring(payload, tensor)

        return wait

    def _sum(self, tensor: Tensor, kind: TrafficKind, group: dist.ProcessGroup | None) -> None:
        with self.explained(f"sum {kind} data over ranks"):
            payload = self._on_wire(tensor)
            dist.all_reduce(payload, group=group)
            _bring(payload, tensor)
        self._count_sum(tensor.nbytes, kind, group)

    def _count_sum(
        self, num_bytes: int, kind: TrafficKind, group: dist.ProcessGroup | None
    ) -> None:
        """Count this rank's part of what a ring of n receives for a sum: 2 (n - 1) times it."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        total = 2 * (size - 1) * num_bytes
        self.meter.count_bytes(kind, total * (rank + 1) // size - total * rank // size)

    def exchange(
        self,
        kind: TrafficKind,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        codec: Codec = PLAIN,
    ) -> Exchange:
        """Start to swap tensors with other ranks, which must make the same calls in this order.

        Args:
            kind: What it is.
            sends: Ranks and what they get.
            receives: Ranks and where to put what they send.
            codec: That all tensors are sent with.
        """
        parcels = [Parcel(buffer, codec, self.mesh.wire_device) for _, buffer in receives]
        with self.explained(f"exchange {kind} data"):
            ops = [
                dist.P2POp(dist.irecv, parcel.place, rank, tag=_EXCHANGE_TAG)
                for (rank, _), parcel in zip(receives, parcels, strict=True)
                if parcel.num_bytes
            ]
            payloads = [(rank, self._encode(tensor, codec)) for rank, tensor in sends]
            ops += [
                dist.P2POp(dist.isend, payload, rank, tag=_EXCHANGE_TAG)
                for rank, payload in payloads
                if payload.numel()
            ]
            # One by one NCCL would wait for each receive before it sends.
            works = dist.batch_isend_irecv(ops) if ops else []
        kept = [payload for _, payload in payloads]
        self.meter.count_bytes(kind, sum(parcel.num_bytes for parcel in parcels))
        return Exchange(self, kind, works, parcels, kept)

    def all_gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, each a list of as many 64-bit integers."""
        if not self.mesh.is_distributed:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64, device=self.mesh.wire_device)
        all_numbers = [torch.empty_like(own) for _ in range(self.mesh.size)]
        with self.explained("compare the batch with the other ranks"):
            dist.all_gather(all_numbers, own)
        self.meter.count("control", *all_numbers)
        return [one.tolist() for one in all_numbers]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        with self.explained("meet the other ranks"):
            met = torch.zeros(1, device=self.mesh.wire_device)
            dist.all_reduce(met)  # dist.barrier() would choose between backends by itself
            met.item()

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the picklable `value` of rank `source`."""
        if not self.mesh.is_distributed:
            return value
        box = [value]
        with self.explained(f"broadcast from rank {source}"):
            dist.broadcast_object_list(box, source, device=self.mesh.wire_device)
        return box[0]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its result, or raise its error, on all."""
        result: T | None = None
        error: Exception | None = None
        if self.mesh.is_root:
            try:
                result = work()
            except ValueError as found:
                error = found
        result, error = self.broadcast_object((result, error))
        if error is not None:
            raise error
        return cast(T, result)

    def all_gather_objects(self, value: T) -> list[T]:
        """Return the picklable values of all ranks."""
        if not self.mesh.is_distributed:
            return [value]
        values: list[Any] = [None] * self.mesh.size
        with self.explained("gather from all ranks"):
            dist.all_gather_object(values, value)
        return values

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or a copy of it, as it can be sent."""
        return tensor.detach().to(self.mesh.wire_device).contiguous()

    def _encode(self, tensor: Tensor, codec: Codec) -> Tensor:
        """Return what `tensor` is sent as."""
        self._seed += 1
        return self._on_wire(codec.encode(tensor, self._seed))

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            raise PeerError(
                f"Rank {self.mesh.rank} could not {what}: another rank has failed, or did not "
                f"answer within {self.mesh.timeout.total_seconds():.0f} s. The first error that a "
                "rank printed is the cause. If all ranks are alive and slow, give GNNPipeStrategy "
                f"a longer timeout. ({type(error).__name__}: {error})"
            ) from error


@dataclass(slots=True)
class Exchange:
    """Tensors on their way, both directions."""

    _transport: Transport
    _kind: TrafficKind
    _works: list[Any]
    _parcels: list[Parcel]
    _sent: list[Tensor]

    def wait(self) -> list[Tensor]:
        """Wait until all has come and gone; return what was received."""
        transport = self._transport
        with transport.explained(f"wait for {self._kind} data"):
            for work in self._works:
                work.wait(transport.mesh.timeout)
        self._sent.clear()
        return [parcel.open() for parcel in self._parcels]


def _bring(place: Tensor, target: Tensor) -> None:
    """Copy to `target` what has come in at `place`, if they are not the same."""
    if place.data_ptr() != target.data_ptr() or place.device != target.device:
        target.detach().copy_(place)


def _tag(kind: TrafficKind, chunk: int, index: int) -> int:
    assert index < _MAX_TENSORS
    return (2 * chunk + (kind == "backward")) * _MAX_TENSORS + index

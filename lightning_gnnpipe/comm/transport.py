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

from lightning_gnnpipe.comm.mesh import Mesh, World, make_mesh
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
    """Point-to-point messages between ranks, and collectives over all of them.

    Args:
        world: The ranks.
        meter: Counts what travels.
    """

    def __init__(self, world: World, meter: Meter) -> None:
        self.world = world
        self.meter = meter
        self._mesh: Mesh | None = None
        self._meshes: dict[tuple[int, int], Mesh] = {}  # torch has no cheap way to end a group
        self._sends: list[tuple[Any, Tensor]] = []
        self._receives: dict[tuple[TrafficKind, int], tuple[list[Any], list[Parcel]]] = {}
        self._seed = 0

    @property
    def mesh(self) -> Mesh:
        """This rank's place among stages and shards, once it has one."""
        assert self._mesh is not None, "the layout has not been settled"
        return self._mesh

    @property
    def is_settled(self) -> bool:
        """Whether ranks have been dealt out to stages and shards."""
        return self._mesh is not None

    def settle(self, layout: tuple[int, int] | None) -> None:
        """Deal the ranks out to so many stages of so many shards; a collective call.

        None leaves the layout open until the next call.
        """
        if layout is not None and layout not in self._meshes:
            with self.explained("deal ranks out to {} stages of {} shards".format(*layout)):
                self._meshes[layout] = make_mesh(self.world, *layout)
        self._mesh = None if layout is None else self._meshes[layout]

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
        parcels = [Parcel(buffer, codec, self.world.wire_device) for buffer in buffers]
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
                work.wait(self.world.timeout)
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
                work.wait(self.world.timeout)
        self._sends.clear()

    def broadcast(self, tensor: Tensor, source: int, kind: TrafficKind) -> None:
        """Overwrite `tensor` by that of rank `source`."""
        if not self.world.is_distributed:
            return
        with self.explained(f"broadcast {kind} data from rank {source}"):
            payload = self._on_wire(tensor)
            dist.broadcast(payload, source)
            _bring(payload, tensor)
        if self.world.rank != source:
            self.meter.count(kind, tensor)

    def all_reduce(self, tensor: Tensor, kind: TrafficKind) -> None:
        """Sum `tensor` over all ranks, in place."""
        if self.world.is_distributed:
            self._sum(tensor, kind, None)

    def sum_over_shards(self, tensor: Tensor, kind: TrafficKind) -> None:
        """Sum `tensor` over the ranks of this stage, in place."""
        if self.mesh.num_shards > 1:
            self._sum(tensor, kind, self.mesh.shards)

    def start_sum_over_shards(self, tensor: Tensor, kind: TrafficKind) -> Callable[[], None]:
        """Start to sum `tensor` over the ranks of this stage; return what waits for it."""
        payload = self._on_wire(tensor)
        with self.explained(f"sum {kind} data over ranks"):
            work = dist.all_reduce(payload, group=self.mesh.shards, async_op=True)
        self.meter.count(kind, tensor)

        def wait() -> None:
            with self.explained(f"sum {kind} data over ranks"):
                work.wait(self.world.timeout)
            _bring(payload, tensor)

        return wait

    def _sum(self, tensor: Tensor, kind: TrafficKind, group: dist.ProcessGroup | None) -> None:
        with self.explained(f"sum {kind} data over ranks"):
            payload = self._on_wire(tensor)
            dist.all_reduce(payload, group=group)
            _bring(payload, tensor)
        self.meter.count(kind, tensor)

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
        parcels = [Parcel(buffer, codec, self.world.wire_device) for _, buffer in receives]
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
        if not self.world.is_distributed:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64, device=self.world.wire_device)
        all_numbers = [torch.empty_like(own) for _ in range(self.world.size)]
        with self.explained("compare the batch with the other ranks"):
            dist.all_gather(all_numbers, own)
        self.meter.count("control", *all_numbers)
        return [one.tolist() for one in all_numbers]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        with self.explained("meet the other ranks"):
            met = torch.zeros(1, device=self.world.wire_device)
            dist.all_reduce(met)  # dist.barrier() would choose between backends by itself
            met.item()

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the picklable `value` of rank `source`."""
        if not self.world.is_distributed:
            return value
        box = [value]
        with self.explained(f"broadcast from rank {source}"):
            dist.broadcast_object_list(box, source, device=self.world.wire_device)
        return box[0]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its result, or raise its error, on all."""
        result: T | None = None
        error: Exception | None = None
        if self.world.is_root:
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
        if not self.world.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world.size
        with self.explained("gather from all ranks"):
            dist.all_gather_object(values, value)
        return values

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or a copy of it, as it can be sent."""
        return tensor.detach().to(self.world.wire_device).contiguous()

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
                f"Rank {self.world.rank} could not {what}: another rank has failed, or did not "
                f"answer within {self.world.timeout.total_seconds():.0f} s. The first error that a "
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
                work.wait(transport.world.timeout)
        self._sent.clear()
        return [parcel.open() for parcel in self._parcels]


def _bring(place: Tensor, target: Tensor) -> None:
    """Copy to `target` what has come in at `place`, if they are not the same."""
    if place.data_ptr() != target.data_ptr() or place.device != target.device:
        target.detach().copy_(place)


def _tag(kind: TrafficKind, chunk: int, index: int) -> int:
    assert index < _MAX_TENSORS
    return (2 * chunk + (kind == "backward")) * _MAX_TENSORS + index

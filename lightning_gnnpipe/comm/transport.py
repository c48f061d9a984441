"""Messages between stages and between shards, with sizes known from the plan.

Receives are posted early, because gloo moves no data before the peer has posted. Sends are waited
for at the end of a phase; their tensors stay alive until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnnpipe.codecs import Codec, Parcel
from lightning_gnnpipe.comm.collectives import Collectives, Meter
from lightning_gnnpipe.comm.groups import Members, Mesh, World, make_axes
from lightning_gnnpipe.comm.watch import Watch
from lightning_gnnpipe.types import TrafficKind

PLAIN = Codec()  # no encoding

_KINDS = "forward", "backward", "weight_grad"
_MAX_TENSORS, _MAX_KINDS, _MAX_CHUNKS, _MAX_RUNS = 2**10, 2**2, 2**15, 2**4  # 31 bits per tag
_EXCHANGE_TAG = 1  # exchanging ranks have no other messages, and gloo keeps the order


class Label(NamedTuple):
    """Identifies a message between two ranks: kind of data, and chunk, or number of weights."""

    kind: TrafficKind
    chunk: int

    def __str__(self) -> str:
        if self.kind == "weight_grad":
            return "gradients of weights"
        return f"{self.kind} data of chunk {self.chunk}"


class Transport(Collectives):
    """Messages between the ranks of a replica, and collectives along the axes of the mesh.

    `layout`: stages, and shards of each stage. The ranks of each collective: see `Axes`.

    Attributes:
        waited_s: Seconds that this rank has waited for other shards of its stage.
    """

    def __init__(self, world: World, layout: tuple[int, int], meter: Meter) -> None:
        super().__init__(world, meter, Members(range(world.size)), Watch(world.rank, world.size))
        self.mesh = Mesh(world.rank, *layout, world.num_replicas)
        with self.explained("assign ranks to {} stages of {} shards".format(*layout)):
            self.axes = make_axes(world, self.mesh)
            self.members, *more = self.axes
            self._connect()
        self.everyone, self._shards, self.pipe, self.replicas, self.asked = (
            Collectives(world, meter, one, self.watch) for one in more
        )
        self.waited_s = 0.0
        self._sends: list[tuple[Any, Tensor]] = []
        self._receives: dict[Label, tuple[list[Any], list[Parcel]]] = {}
        self._run = 0
        self.seed = 0  # of the codecs in this step; each message takes the next

    def _connect(self) -> None:
        """Let each two stages meet: at their first message NCCL blocks until both are there."""
        flag = torch.zeros(1, device=self.world.wire_device)
        for pair in combinations(range(self.mesh.num_stages), 2) if flag.is_cuda else ():
            if self.mesh.stage in pair:
                is_first = self.mesh.stage == pair[0]
                meet = dist.send if is_first else dist.recv
                meet(flag, self.mesh.rank_of(pair[is_first]), self.members.group)

    def begin_run(self) -> None:
        """Start the watch, and use new tags: messages of an earlier run may be in flight."""
        self._sends.clear()
        self._receives.clear()
        if self.world.is_distributed:
            self._run = (self._run + 1) % _MAX_RUNS
            self.watch.start(self.axes.groups)

    def post_receive(
        self, source: int, label: Label, buffers: Sequence[Tensor], codec: Codec = PLAIN
    ) -> None:
        """Start to receive a message of rank `source` into `buffers`."""
        parcels = [Parcel(buffer, codec, self.world.wire_device) for buffer in buffers]
        with self.explained(f"receive {label} from rank {source}"):
            works = [
                dist.irecv(parcel.place, source, self.members.group, self._tag(label, i))
                for i, parcel in enumerate(parcels)
                if parcel.num_bytes
            ]
        self._receives[label] = (works, parcels)

    def wait_receive(self, label: Label) -> list[Tensor]:
        """Wait for a message and return its tensors."""
        works, parcels = self._receives.pop(label)
        num_bytes = sum(parcel.num_bytes for parcel in parcels)
        with self.explained(f"wait for {label}"):
            for work in works:
                work.wait(self.world.timeout)
        self.meter[label.kind] += num_bytes
        return [parcel.open() for parcel in parcels]

    def send(
        self, target: int, label: Label, tensors: Sequence[Tensor], codec: Codec = PLAIN
    ) -> None:
        """Start to send `tensors` as one message to rank `target`."""
        payloads = [self._encode(tensor, codec) for tensor in tensors]
        with self.explained(f"send {label} to rank {target}"):
            for i, payload in enumerate(payloads):
                if payload.numel():
                    tag = self._tag(label, i)
                    work = dist.isend(payload, target, self.members.group, tag)
                    self._sends.append((work, payload))

    def flush(self) -> None:
        """Wait until all is sent."""
        sends, self._sends = self._sends, []
        with self.explained("wait for sent data to be received"):
            for work, _ in sends:
                work.wait(self.world.timeout)

    def sum_over_shards(self, tensor: Tensor, kind: TrafficKind) -> None:
        """Sum `tensor` over the shards of this stage, in place."""
        with self.waiting():
            self._shards.all_reduce(tensor, kind)

    def share_of_stages(self, tensors: Mapping[int, Sequence[Tensor]]) -> None:
        """Overwrite `tensors`, by stage, with the values of their stage; not counted."""
        with self.meter.paused():
            for stage, several in sorted(tensors.items(), key=lambda one: one[0]):
                self.pipe.broadcast_all(several, self.mesh.rank_of(stage))

    def exchange(
        self,
        kind: TrafficKind,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        codec: Codec = PLAIN,
    ) -> Callable[[], list[Tensor]]:
        """Start to swap (rank, tensor) pairs; the ranks must make the same calls in this order.

        Returns the function that waits for all sends and receives and returns the received tensors.
        """
        parcels = [Parcel(buffer, codec, self.world.wire_device) for _, buffer in receives]
        payloads = [(rank, self._encode(tensor, codec)) for rank, tensor in sends]
        group = self.members.group
        with self.explained(f"exchange {kind} data"):
            ops = [
                dist.P2POp(dist.irecv, parcel.place, rank, group, _EXCHANGE_TAG)
                for (rank, _), parcel in zip(receives, parcels, strict=True)
                if parcel.num_bytes
            ]
            ops += [
                dist.P2POp(dist.isend, payload, rank, group, _EXCHANGE_TAG)
                for rank, payload in payloads
                if payload.numel()
            ]
            # Batched, because otherwise NCCL waits for each receive before it sends.
            works = dist.batch_isend_irecv(ops) if ops else []
        num_bytes = sum(parcel.num_bytes for parcel in parcels)
        self.meter[kind] += num_bytes

        def wait() -> list[Tensor]:
            with self.explained(f"wait for {kind} data"), self.waiting():
                for work in works:
                    work.wait(self.world.timeout)
            payloads.clear()  # alive until here
            return [parcel.open() for parcel in parcels]

        return wait

    def _encode(self, tensor: Tensor, codec: Codec) -> Tensor:
        self.seed += 1
        return self._on_wire(codec.encode(tensor, self.seed))

    def _tag(self, label: Label, index: int) -> int:
        """Return a tag that is unique among the messages in flight between two ranks."""
        assert index < _MAX_TENSORS
        place = self._run * _MAX_CHUNKS + label.chunk % _MAX_CHUNKS
        return (place * _MAX_KINDS + _KINDS.index(label.kind)) * _MAX_TENSORS + index

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time of the block to `waited_s`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - start

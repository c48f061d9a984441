"""Sums of gradients over ranks, in buckets as in PyTorch's DDP (Li et al., arXiv 2006.15704).

All ranks send the buckets in the same order, that of backward, each as soon as it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Members, Transport, sum_along_pipe
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.types import TrafficKind

_BUCKET_BYTES = 2**20  # large enough that bandwidth dominates latency

Named = Sequence[tuple[str, nn.Parameter]]
Earlier = Mapping[str, Tensor | None]  # gradients that are added to the sums, by name


class BucketSums:
    """Sums gradients over the ranks `over`, at least two; `earlier` is added to the sums."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        transport: Transport,
        kind: TrafficKind,
        over: Members,
        *,
        scale: float = 1.0,
        earlier: Earlier | None = None,
    ) -> None:
        self._transport, self._kind, self._over = transport, kind, over
        self._scale, self._earlier = scale, earlier or {}
        self._parameters = parameters
        self._waiting = list(_buckets(reversed(list(parameters.items()))))
        self._ready: set[Tensor] = set()
        self._running: list[tuple[Callable[[], None], Tensor, Named]] = []

    def watch(self, late: Collection[str]) -> list[Callable[[], None]]:
        """Sum each gradient once it is ready, except `late` ones; return functions to stop this."""

        def note(parameter: Tensor) -> None:
            self._ready.add(parameter)
            self._start_full()

        return [
            parameter.register_post_accumulate_grad_hook(note).remove  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
            if name not in late
        ]

    def finish(self) -> None:
        """Start the remaining sums, wait for all, and write them to the gradients."""
        self._ready.update(self._parameters.values())
        self._start_full()
        for wait, total, bucket in self._running:
            wait()
            put_back(total, bucket, self._earlier)

    def _start_full(self) -> None:
        while self._waiting and all(p in self._ready for _, p in self._waiting[0]):
            bucket = self._waiting.pop(0)
            total = flatten(bucket, self._scale)
            wait = self._transport.start_sum(total, self._kind, self._over, num_flags=len(bucket))
            self._running.append((wait, total, bucket))


def flatten(parameters: Named, scale: float = 1.0) -> Tensor:
    """Return the gradients as one row, then one flag each: 1 if there is a gradient, else 0."""
    for name, p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            raise UnsupportedError(
                expected="dense gradients where several ranks sum them",
                found=f"a sparse gradient of '{name}'",
                remedy="Use nn.Embedding(sparse=False).",
            )
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in parameters]
    flags = grads[0].new_tensor([0.0 if p.grad is None else 1.0 for _, p in parameters])
    flat = torch.cat([*(grad.flatten() for grad in grads), flags])
    return flat if scale == 1.0 else flat.mul_(scale)


def put_back(total: Tensor, parameters: Named, earlier: Earlier) -> None:
    """Write the sums to the parameters' gradients, and add `earlier`."""
    *sums, flags = torch.split(total, [*(p.numel() for _, p in parameters), len(parameters)])
    for (name, parameter), flat, flag in zip(parameters, sums, flags.tolist(), strict=True):
        summed = flat.view_as(parameter) if flag else None
        both = [one for one in (earlier.get(name), summed) if one is not None]
        parameter.grad = both[0] + both[1] if len(both) == 2 else next(iter(both), None)


def _buckets(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Named]:
    """Yield consecutive parameters of one dtype, up to the bucket size."""
    bucket: list[tuple[str, nn.Parameter]] = []
    num_bytes = 0
    for name, parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if bucket and (bucket[0][1].dtype != parameter.dtype or num_bytes + size > _BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, parameter))
        num_bytes += size
    if bucket:
        yield bucket


class GradientSums:
    """The gradient sums of one backward pass: over shards or replicas, then over stages (`users`).

    Sums over stages and shards exclude accumulated gradients, which are added at the end. Averages
    over replicas include them. Each shard has all of the gradient of its rows of the tables `cut`.
    """

    def __init__(
        self,
        module: nn.Module,
        users: Mapping[str, set[int]],
        transport: Transport,
        *,
        averages: bool = True,
        cut: Collection[str] = (),
    ) -> None:
        self._transport = transport
        mesh = transport.mesh
        used = {
            name: p
            for name, p in module.named_parameters()
            if p.requires_grad and mesh.stage in users.get(name, ()) and name not in cut
        }
        self._tied = {name: p for name, p in used.items() if len(users[name]) > 1}
        self._groups = group_tied(module, users)
        self._averages = averages and mesh.num_replicas > 1
        self._scale = 1 / mesh.num_replicas if self._averages else 1.0
        own = {name: p for name, p in used.items() if name not in self._tied}
        self._earlier: dict[str, Tensor | None] = {}
        for name, parameter in self._tied.items():
            if self._averages and mesh.stage == min(users[name]):
                continue  # the first stage adds accumulated gradients
            self._earlier[name] = None if self._averages else parameter.grad
            parameter.grad = None
        self._own: BucketSums | None = None
        if self._averages:
            assert mesh.num_shards == 1
            self._own = BucketSums(own, transport, "data_grad", mesh.replicas, scale=self._scale)
        elif mesh.num_shards > 1:
            earlier = {name: p.grad for name, p in own.items()}
            for parameter in own.values():
                parameter.grad = None
            self._own = BucketSums(own, transport, "weight_grad", mesh.shards, earlier=earlier)

    def watch(self, late: Collection[str]) -> list[Callable[[], None]]:
        return [] if self._own is None else self._own.watch(late)

    def finish(self) -> None:
        if self._own is not None:
            self._own.finish()
        for number, (stages, names) in enumerate(self._groups):
            if self._transport.mesh.stage in stages:
                tied = [(name, self._tied[name]) for name in names]
                total = sum_along_pipe(
                    self._transport,
                    flatten(tied, self._scale),
                    stages,
                    "tied_grad",
                    number,
                    num_flags=len(tied),
                    over_replicas=self._averages,
                )
                put_back(total, tied, self._earlier)


def average_replicated(
    transport: Transport, module: nn.Module, of_stages: Collection[int], root: nn.Module
) -> None:
    """Average gradients of `root` over replicas; collective.

    Parameters with ids in `of_stages` are left out. Every stage has the same gradients. One sum
    over all ranks gives all of them the same bits.
    Parameters of `module` that no stage has are sent only if a rank has a gradient of one.
    """
    inside = {id(p) for p in module.parameters()}
    trained = [p for p in root.parameters() if p.requires_grad and id(p) not in of_stages]
    idle = [p for p in trained if id(p) in inside]
    has_grad = any(p.grad is not None for p in idle)
    if idle and not any(transport.everyone.all_gather_objects(has_grad)):
        trained = [p for p in trained if id(p) not in inside]
    named = {str(number): p for number, p in enumerate(trained)}
    if named:
        everyone, scale = transport.everyone.members, 1 / transport.world.size
        BucketSums(named, transport, "data_grad", everyone, scale=scale).finish()


def group_tied(
    module: nn.Module, users: Mapping[str, set[int]]
) -> list[tuple[tuple[int, ...], list[str]]]:
    """Group tied parameters by stages and dtype; same result on all ranks."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
    for name, parameter in module.named_parameters():
        stages = tuple(sorted(users.get(name, ())))
        if parameter.requires_grad and len(stages) > 1:
            groups.setdefault((stages, parameter.dtype), []).append(name)
    return [(stages, names) for (stages, _), names in groups.items()]


@contextmanager
def without_gradients(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Drop new gradients of parameters among `names` after the block."""
    named = dict(module.named_parameters()) if names else {}
    absent = [named[name] for name in names if name in named and named[name].grad is None]
    yield
    for parameter in absent:
        parameter.grad = None

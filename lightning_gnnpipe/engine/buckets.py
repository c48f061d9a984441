"""Sums of gradients over ranks, many parameters at a time, each bucket as soon as it is full.

    parameters, in the order that backward reaches them:   [p9 p8 p7] [p6 p5] [p4 p3 p2 p1 p0]
                                                            sum ->     sum ->   ...

Ranks must take the buckets in the same order, so a full one waits for those before it.

Source: gradient bucketing in PyTorch's DistributedDataParallel (Li et al., arXiv 2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Members, Transport
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.types import TrafficKind

_BUCKET_BYTES = 2**20  # enough for the time of a message to be small beside that of its bytes

Named = Sequence[tuple[str, nn.Parameter]]
Earlier = Mapping[str, Tensor | None]  # gradients that are added to the sums, by name


class BucketSums:
    """The sums of the gradients of some parameters, which all of these ranks have.

    Args:
        parameters: By name; alike on these ranks.
        transport: The ranks.
        kind: Of the traffic.
        over: The ranks; at least two.
        scale: Factor on the gradients.
        earlier: What is added to the sums.
    """

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
        self._ready: set[str] = set()
        self._finish: list[Callable[[], None]] = []

    def watch(self) -> list[Callable[[], None]]:
        """Start sums as soon as gradients are there, from now on; return what ends that."""

        def note(name: str) -> Callable[[Tensor], None]:
            def run(parameter: Tensor) -> None:
                self._ready.add(name)
                self._start_full()

            return run

        return [
            parameter.register_post_accumulate_grad_hook(note(name)).remove  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
        ]

    def finish(self) -> None:
        """Start what has not been, wait for all sums and put them in place of the gradients."""
        self._ready.update(self._parameters)
        self._start_full()
        for finish in self._finish:
            finish()

    def _start_full(self) -> None:
        while self._waiting and all(name in self._ready for name, _ in self._waiting[0]):
            self._start(self._waiting.pop(0))

    def _start(self, bucket: Named) -> None:
        total = flatten(bucket, self._scale)
        over, num_flags = self._over, len(bucket)
        wait = self._transport.start_sum(total, self._kind, over, num_flags=num_flags)

        def finish() -> None:
            wait()
            put_back(total, bucket, self._earlier)

        self._finish.append(finish)


def flatten(parameters: Named, scale: float = 1.0) -> Tensor:
    """Return the gradients in one row, then a 1 for each that is there: one may have no use.

    Raises:
        UnsupportedError: If one is sparse.
    """
    for name, p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            raise UnsupportedError(
                explain(
                    expected="dense gradients where several ranks sum them",
                    found=f"a sparse one of '{name}'",
                    remedy="Use nn.Embedding(sparse=False), or let one rank alone have the layer: "
                    "graph_parallel=1, data_parallel=1, repeat_encoder=False.",
                )
            )
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in parameters]
    flags = grads[0].new_tensor([0.0 if p.grad is None else 1.0 for _, p in parameters])
    flat = torch.cat([*(grad.flatten() for grad in grads), flags])
    return flat if scale == 1.0 else flat.mul_(scale)


def put_back(total: Tensor, parameters: Named, earlier: Earlier) -> None:
    """Give parameters their parts of the sums, and what is to be added."""
    *sums, flags = torch.split(total, [*(p.numel() for _, p in parameters), len(parameters)])
    for (name, parameter), flat, flag in zip(parameters, sums, flags.tolist(), strict=True):
        summed = flat.view_as(parameter) if flag else None
        both = [one for one in (earlier.get(name), summed) if one is not None]
        parameter.grad = both[0] + both[1] if len(both) == 2 else next(iter(both), None)


def _buckets(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Named]:
    """Yield parameters of one dtype that follow each other, up to the size of a bucket."""
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

"""Sums of gradients of parameters that several ranks use, and means over replicas.

Those of one stage are summed over its shards, or averaged over the data axis, as soon as the last
chunk's backward has reached them; those that several stages use (tied ones), over the ranks of
these stages, at the end. A mean over replicas is that of all that has been accumulated since the
weights were last changed, so one in front of each optimizer step is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Transport, sum_along_pipe
from lightning_gnnpipe.engine.buckets import BucketSums, flatten, put_back


class GradientSums:
    """The sums of one backward pass.

    What the gradients were before is added to the sums over stages and shards, at the end; means
    over replicas take it in.

    Args:
        module: The pipelined module.
        users: The stages of each of its tensors.
        transport: The ranks.
        averages: Whether gradients are averaged over replicas, if there are several.
    """

    def __init__(
        self,
        module: nn.Module,
        users: Mapping[str, set[int]],
        transport: Transport,
        *,
        averages: bool = True,
    ) -> None:
        self._transport = transport
        mesh = transport.mesh
        used = {
            name: p
            for name, p in module.named_parameters()
            if p.requires_grad and mesh.stage in users.get(name, ())
        }
        self._tied = {name: p for name, p in used.items() if len(users[name]) > 1}
        self._groups = group_tied(module, users)
        self._averages = averages and mesh.num_replicas > 1
        self._scale = 1 / mesh.num_replicas if self._averages else 1.0
        own = {name: p for name, p in used.items() if name not in self._tied}
        self._earlier: dict[str, Tensor | None] = {}
        for name, parameter in self._tied.items():
            if self._averages and mesh.stage == min(users[name]):
                continue  # counts what was accumulated in, for all of its stages
            self._earlier[name] = None if self._averages else parameter.grad
            parameter.grad = None
        self._own: BucketSums | None = None
        if self._averages:
            assert mesh.num_shards == 1
            over = mesh.replicas
            self._own = BucketSums(own, transport, "data_grad", over, scale=self._scale)
        elif mesh.num_shards > 1:
            earlier = {name: p.grad for name, p in own.items()}
            for parameter in own.values():
                parameter.grad = None
            over = mesh.shards
            self._own = BucketSums(own, transport, "weight_grad", over, earlier=earlier)

    def watch(self) -> list[Callable[[], None]]:
        """Start sums as soon as gradients are there, from now on; return what ends that."""
        return [] if self._own is None else self._own.watch()

    def finish(self) -> None:
        """Wait for all sums and add what was there before."""
        if self._own is not None:
            self._own.finish()
        for number, (stages, names) in enumerate(self._groups):
            if self._transport.mesh.stage in stages:
                self._sum_tied(number, stages, [(name, self._tied[name]) for name in names])

    def _sum_tied(
        self, number: int, stages: Sequence[int], tied: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        """Sum the gradients of parameters that the same stages use."""
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


def average_replicated(transport: Transport, parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients of parameters that no stage owns over all replicas; collective.

    Every stage has the same ones. They are summed over all ranks at once, so that all get the same
    bits.

    Args:
        transport: The ranks.
        parameters: Alike on all of them, in the same order.
    """
    named = {str(number): p for number, p in enumerate(parameters) if p.requires_grad}
    if named:
        everyone, scale = transport.everyone.members, 1 / transport.world.size
        BucketSums(named, transport, "data_grad", everyone, scale=scale).finish()


def group_tied(
    module: nn.Module, users: Mapping[str, set[int]]
) -> list[tuple[tuple[int, ...], list[str]]]:
    """Return the names of tied parameters with the same stages and dtype; alike on all ranks."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
    for name, parameter in module.named_parameters():
        stages = tuple(sorted(users.get(name, ())))
        if parameter.requires_grad and len(stages) > 1:
            groups.setdefault((stages, parameter.dtype), []).append(name)
    return [(stages, names) for (stages, _), names in groups.items()]

"""Gradients on all ranks: a stage computes its layers', and every rank updates all weights.

With weights="staged" only the ranks of its stages have the gradient of a weight. Gradients of what
all ranks compute alike, the head and outer modules, come from the first rank, so that ranks cannot
drift apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Label, Transport
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.steps.staged_weights import StagedWeights

Named = Sequence[tuple[str, nn.Parameter]]


class GradientSums:
    """Gradients of one backward phase of the weights that stages use, on all ranks of a replica.

    A stage sends its gradients to all other stages as soon as its last chunk is done, which hides
    behind the chunks of earlier stages. A weight of several stages is summed on the way::

        stage 2   ccccc -> its own to all, its part of tied ones to the stage before
        stage 1    ccccc -> its own to all, the sum of both parts
        stage 0     ccccc -> its own to all, the total of tied ones to all

    Shards sum theirs before. `users`: the stages of each weight. Gradients of `staged` weights go
    to the stages that use them alone. Gradients that are there before the phase are equal on all
    ranks, and no part of sums.
    """

    def __init__(
        self,
        module: nn.Module,
        users: Mapping[str, set[int]],
        transport: Transport,
        staged: StagedWeights,
    ) -> None:
        self._transport, self._own = transport, transport.mesh.stage
        found: dict[tuple[tuple[int, ...], bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in module.named_parameters() if transport.has_others else ():
            stages = tuple(sorted(users.get(name, ())))
            if parameter.requires_grad and stages:
                key = stages, parameter in staged.stages, parameter.dtype
                found.setdefault(key, []).append((name, parameter))
        every, self._groups = tuple(range(transport.mesh.num_stages)), list[_Group]()
        for i, ((stages, is_staged, _), named) in enumerate(found.items()):
            labels = Label("weight_grad", 2 * i), Label("weight_grad", 2 * i + 1)
            group = _Group(stages, stages if is_staged else every, named, *labels)
            is_shared = max(len(group.holders), transport.mesh.num_shards) > 1
            if is_shared and self._own in group.holders:
                self._groups.append(group)
        self._earlier: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        """Set earlier gradients aside where the phase's own are summed."""
        for group in self._groups:
            if len(group.users) > 1 or self._transport.mesh.num_shards > 1:
                for name, parameter in group.named:
                    self._earlier[name], parameter.grad = parameter.grad, None

    def expect_later(self) -> None:
        """Start to receive from later stages; call it once gradients of the last chunk have come.

        NCCL keeps the order of all messages between two ranks, and its receives occupy the GPU.
        """
        self._expect(range(self._own + 1, self._transport.mesh.num_stages))

    def finish(self) -> None:
        """Send the gradients of this stage, and write the sums of all stages to the weights."""
        transport, rank_of = self._transport, self._transport.mesh.rank_of
        for one in self._groups:
            if self._own not in one.users:
                continue
            flat = _flatten(one.named)
            transport.sum_over_shards(flat, "weight_grad")
            if self._own != one.users[-1]:
                flat += transport.wait_receive(one.part)[0]
            if self._own != one.users[0]:
                before = one.users[one.users.index(self._own) - 1]
                transport.send(rank_of(before), one.part, [flat])
                continue
            for stage in one.holders:
                if stage != self._own:
                    transport.send(rank_of(stage), one.total, [flat])
            _put_back(flat, one.named, self._earlier)
        self._expect(range(self._own))
        for one in self._groups:
            if self._own != one.users[0]:
                _put_back(transport.wait_receive(one.total)[0], one.named, self._earlier)
        if transport.has_others:
            transport.flush()
        self._earlier.clear()

    def _expect(self, stages: Iterable[int]) -> None:
        """Start to receive what `stages` will send."""
        for stage, one in product(stages, self._groups):
            labels = [one.total] if stage == one.users[0] else []
            if (self._own, stage) in pairwise(one.users):
                labels = [one.part]
            for label in labels:
                size = sum(p.numel() + 1 for _, p in one.named)
                flat = one.named[0][1].new_empty(size, requires_grad=False)
                self._transport.post_receive(self._transport.mesh.rank_of(stage), label, [flat])


class _Group(NamedTuple):
    """Weights that the same stages use and hold, of one dtype, whose gradients are one message."""

    users: tuple[int, ...]
    holders: tuple[int, ...]
    named: Named
    part: Label  # of the sum so far, from a user to the one before
    total: Label  # of the sum, from the first user to all holders


def share_gradients(
    transport: Transport, root: nn.Module, of_stages: Collection[int], staged: StagedWeights
) -> None:
    """Give all ranks the gradients of the first one, averaged over replicas; collective.

    Within a replica the gradients of the parameters with ids in `of_stages` are equal already, and
    of `staged` ones only ranks of their stages have any.
    """
    mesh = transport.mesh
    groups: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, p in root.named_parameters() if transport.world.is_distributed else ():
        is_equal = mesh.num_replicas == 1 and (
            id(p) in of_stages or (p.grad is not None and p.grad.is_sparse)
        )
        if p.requires_grad and not is_equal and staged.holds(p):
            groups.setdefault((p in staged.stages, p.dtype), []).append((name, p))
    first = mesh.rank_of(0, 0)
    for (is_staged, _), named in sorted(groups.items(), key=lambda one: one[0][0]):
        flat = _flatten(named).div_(mesh.num_replicas)
        if mesh.rank == first or is_staged:
            transport.replicas.all_reduce(flat, "data_grad")
        if not is_staged:
            transport.broadcast(flat, first, "weight_grad")
        _put_back(flat, named, {})


def _flatten(parameters: Named) -> Tensor:
    """Return the gradients as one row, then one flag each: 1 if there is a gradient, else 0.

    Optimizers treat a gradient of zeros otherwise than none.
    """
    for name, p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            raise UnsupportedError(
                expected="dense gradients where several ranks share them",
                found=f"a sparse gradient of '{name}'",
                remedy="Use nn.Embedding(sparse=False).",
            )
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in parameters]
    flags = grads[0].new_tensor([0.0 if p.grad is None else 1.0 for _, p in parameters])
    return torch.cat([*(grad.flatten() for grad in grads), flags])


def _put_back(total: Tensor, parameters: Named, earlier: Mapping[str, Tensor | None]) -> None:
    """Write the parts of `total` to the parameters' gradients, and add `earlier`."""
    *sums, flags = torch.split(total, [*(p.numel() for _, p in parameters), len(parameters)])
    for (name, parameter), flat, flag in zip(parameters, sums, flags.tolist(), strict=True):
        summed = flat.view_as(parameter) if flag else None
        both = [one for one in (earlier.get(name), summed) if one is not None]
        parameter.grad = both[0] + both[1] if len(both) == 2 else next(iter(both), None)


@contextmanager
def without_gradients(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Drop new gradients of parameters among `names` after the block."""
    named = dict(module.named_parameters()) if names else {}
    absent = [named[name] for name in names if name in named and named[name].grad is None]
    yield
    for parameter in absent:
        parameter.grad = None

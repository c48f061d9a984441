"""Gradients on all ranks: a stage computes its layers', and every rank updates all weights.

Gradients of what all ranks compute alike, the head and outer modules, come from the first rank, so
that ranks cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import UnsupportedError

Named = Sequence[tuple[str, nn.Parameter]]


class GradientSums:
    """Gradients of one backward phase of the weights that stages use, on all ranks of a replica.

    `users`: the stages of each weight. One stage sends the gradients of its own weights to all
    stages; gradients of weights in several stages are summed. Shards sum theirs before. Gradients
    that are there before the phase are equal on all ranks, and no part of sums.
    """

    def __init__(
        self, module: nn.Module, users: Mapping[str, set[int]], transport: Transport
    ) -> None:
        self._transport = transport
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[str, nn.Parameter]]] = {}
        if transport.has_others:
            for name, parameter in module.named_parameters():
                stages = tuple(sorted(users.get(name, ())))
                if parameter.requires_grad and stages:
                    groups.setdefault((stages, parameter.dtype), []).append((name, parameter))
        # The last stage is the first to end its backward phase.
        order = sorted(groups.items(), key=lambda one: one[0][0], reverse=True)
        self._groups = [(stages, named) for (stages, _), named in order]
        self._earlier: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        """Set earlier gradients aside where the phase's own are summed."""
        for stages, named in self._groups:
            if len(stages) > 1 or self._transport.mesh.num_shards > 1:
                for name, parameter in named:
                    self._earlier[name], parameter.grad = parameter.grad, None

    def finish(self) -> None:
        """Write the gradients of all stages to the weights; collective."""
        transport, mesh = self._transport, self._transport.mesh
        for stages, named in self._groups:
            flat = _flatten(named)
            if mesh.stage in stages:
                transport.sum_over_shards(flat, "weight_grad")
            if len(stages) == 1:
                transport.pipe.broadcast(flat, mesh.rank_of(stages[0]), "weight_grad")
            else:
                transport.pipe.all_reduce(flat, "weight_grad")
            _put_back(flat, named, self._earlier)
        self._earlier.clear()


def share_gradients(transport: Transport, root: nn.Module, of_stages: Collection[int]) -> None:
    """Give all ranks the gradients of the first one, averaged over replicas; collective.

    Within a replica the gradients of the parameters with ids in `of_stages` are equal already.
    """
    mesh = transport.mesh
    groups: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, p in root.named_parameters() if transport.world.is_distributed else ():
        is_equal = mesh.num_replicas == 1 and (
            id(p) in of_stages or (p.grad is not None and p.grad.is_sparse)
        )
        if p.requires_grad and not is_equal:
            groups.setdefault(p.dtype, []).append((name, p))
    first = mesh.rank_of(0, 0)
    for named in groups.values():
        flat = _flatten(named).div_(mesh.num_replicas)
        if mesh.rank == first:
            transport.replicas.all_reduce(flat, "data_grad")
        transport.broadcast(flat, first, "weight_grad")
        _put_back(flat, named, {})


def _flatten(parameters: Named) -> Tensor:
    """Return the gradients as one row, then one flag each: 1 if there is a gradient, else 0."""
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

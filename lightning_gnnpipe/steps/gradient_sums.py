"""Gradients on all ranks: a stage computes its layers', and every rank updates all weights.

With weights="staged" only the ranks of its stages have the gradient of a weight. Gradients of what
all ranks compute alike, the head and outer modules, come from the first rank, so that ranks cannot
drift apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.steps.staged_weights import StagedWeights

Named = Sequence[tuple[str, nn.Parameter]]


class GradientSums:
    """Gradients of one backward phase of the weights that stages use, on all ranks of a replica.

    `users`: the stages of each weight. One stage sends the gradients of its own weights to all
    stages, unless they are `staged`; gradients of weights in several stages are summed. Shards sum
    theirs before. Gradients that are there before the phase are equal on all ranks, and no part of
    sums.
    """

    def __init__(
        self,
        module: nn.Module,
        users: Mapping[str, set[int]],
        transport: Transport,
        staged: StagedWeights | None,
    ) -> None:
        self._transport = transport
        groups: dict[tuple[tuple[int, ...], bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
        if transport.has_others:
            for name, parameter in module.named_parameters():
                stages = tuple(sorted(users.get(name, ())))
                is_staged = staged is not None and parameter in staged
                is_here = not is_staged or transport.mesh.stage in stages
                if parameter.requires_grad and stages and is_here:
                    key = stages, is_staged, parameter.dtype
                    groups.setdefault(key, []).append((name, parameter))
        # The last stage is the first to end its backward phase.
        order = sorted(groups.items(), key=lambda one: one[0][0], reverse=True)
        self._groups = [(stages, is_staged, named) for (stages, is_staged, _), named in order]
        self._earlier: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        """Set earlier gradients aside where the phase's own are summed."""
        for stages, _, named in self._groups:
            if len(stages) > 1 or self._transport.mesh.num_shards > 1:
                for name, parameter in named:
                    self._earlier[name], parameter.grad = parameter.grad, None

    def finish(self) -> None:
        """Write the gradients of all stages to the weights that this rank holds; collective."""
        transport, mesh = self._transport, self._transport.mesh
        for stages, is_staged, named in self._groups:
            if is_staged and len(stages) == mesh.num_shards == 1:
                continue
            flat = _flatten(named)
            if mesh.stage in stages:
                transport.sum_over_shards(flat, "weight_grad")
            if is_staged:
                transport.sum_over_stages(flat, stages, "weight_grad")
            elif len(stages) == 1:
                transport.pipe.broadcast(flat, mesh.rank_of(stages[0]), "weight_grad")
            else:
                transport.pipe.all_reduce(flat, "weight_grad")
            _put_back(flat, named, self._earlier)
        self._earlier.clear()


def share_gradients(
    transport: Transport,
    root: nn.Module,
    of_stages: Collection[int],
    staged: StagedWeights | None,
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
        is_staged = staged is not None and p in staged
        is_here = staged is None or staged.holds(p)
        if p.requires_grad and not is_equal and is_here:
            groups.setdefault((is_staged, p.dtype), []).append((name, p))
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

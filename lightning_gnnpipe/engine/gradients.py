"""Sums of gradients of parameters that several ranks use.

Those of one stage are summed over its shards, each as soon as the last chunk's backward has reached
it; those that several stages use (tied ones), over the ranks of these stages, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Transport, sum_along_pipe
from lightning_gnnpipe.types import TrafficKind


class GradientSums:
    """The sums of one backward pass.

    What the parameters' gradients were before is added at the end.

    Args:
        module: The pipelined module.
        users: The stages of each of its tensors.
        transport: The ranks.
    """

    def __init__(
        self, module: nn.Module, users: Mapping[str, set[int]], transport: Transport
    ) -> None:
        self._transport = transport
        mesh = transport.mesh
        used = {
            name: p
            for name, p in module.named_parameters()
            if p.requires_grad and mesh.stage in users.get(name, ())
        }
        self._tied = {name: p for name, p in used.items() if len(users[name]) > 1}
        is_split = mesh.num_shards > 1
        self._own = {n: p for n, p in used.items() if is_split and n not in self._tied}
        self._groups = group_tied(module, users)
        self._order = list(reversed(self._own))  # that in which backward reaches them, about
        self._before = {name: p.grad for name, p in (*self._tied.items(), *self._own.items())}
        self._finish: dict[str, Callable[[], None]] = {}
        self._ready: set[str] = set()
        for parameter in (*self._tied.values(), *self._own.values()):
            parameter.grad = None

    def watch(self) -> list[Callable[[], None]]:
        """Start sums as soon as gradients are there, from now on; return what ends that."""

        def note(name: str) -> Callable[[Tensor], None]:
            def run(parameter: Tensor) -> None:
                self._ready.add(name)
                self._start_ready()

            return run

        return [
            parameter.register_post_accumulate_grad_hook(note(name)).remove  # type: ignore[no-untyped-call]
            for name, parameter in self._own.items()
        ]

    def finish(self) -> None:
        """Wait for all sums and add what was there before."""
        self._ready.update(self._order)
        self._start_ready()
        for finish in self._finish.values():
            finish()
        for number, (stages, names) in enumerate(self._groups):
            if self._transport.mesh.stage in stages:
                self._sum_tied(number, stages, [(name, self._tied[name]) for name in names])

    def _start_ready(self) -> None:
        """Start the sums whose turn it is: all ranks must take them in the same order."""
        while self._order and self._order[0] in self._ready:
            name = self._order.pop(0)
            self._start(name, self._own[name])

    def _start(self, name: str, parameter: nn.Parameter) -> None:
        total = _flagged([parameter])
        wait = self._transport.start_sum_over_shards(total, "weight_grad", num_flags=1)

        def finish() -> None:
            wait()
            self._take(total, [(name, parameter)])

        self._finish[name] = finish

    def _sum_tied(
        self, number: int, stages: Sequence[int], tied: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        """Sum the gradients of parameters that the same stages use."""
        own = _flagged([parameter for _, parameter in tied])
        kind: TrafficKind = "tied_grad"
        total = sum_along_pipe(self._transport, own, stages, kind, number, num_flags=len(tied))
        self._take(total, tied)

    def _take(self, total: Tensor, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Give parameters their parts of the sums, and what their gradients were before."""
        *sums, flags = torch.split(total, [*(p.numel() for _, p in named), len(named)])
        for (name, parameter), flat, flag in zip(named, sums, flags.tolist(), strict=True):
            summed = flat.view_as(parameter) if flag else None
            both = [one for one in (self._before[name], summed) if one is not None]
            parameter.grad = both[0] + both[1] if len(both) == 2 else next(iter(both), None)


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


def _flagged(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients in one row, then a 1 for each that is there: one may have no use."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flags = grads[0].new_tensor([0.0 if p.grad is None else 1.0 for p in parameters])
    return torch.cat([*(grad.flatten() for grad in grads), flags])

"""Sums of gradients of parameters that several ranks use.

Those of one stage are summed over its shards, each as soon as the last chunk's backward has reached
it; those that several stages use (tied ones), over all ranks, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.stages import Shape

ShapeOf = Callable[[str, Tensor], Shape]


class GradientSums:
    """The sums of one backward pass.

    What the parameters' gradients were before is added at the end.

    Args:
        module: The pipelined module.
        users: The stages of each of its tensors.
        transport: The ranks.
        shape_of: Returns shape and dtype of a parameter that is empty here.
    """

    def __init__(
        self,
        module: nn.Module,
        users: Mapping[str, set[int]],
        transport: Transport,
        shape_of: ShapeOf,
    ) -> None:
        self._transport, self._shape_of = transport, shape_of
        mesh = transport.mesh
        named = {n: p for n, p in module.named_parameters() if n in users and p.requires_grad}
        self._tied = {name: p for name, p in named.items() if len(users[name]) > 1}
        is_split = mesh.num_shards > 1
        self._own = {n: p for n, p in named.items() if is_split and users[n] == {mesh.stage}}
        self._users = users
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
        for name, parameter in self._tied.items():
            grad = parameter.grad
            if grad is None:
                shape, dtype = self._shape_of(name, parameter)
                grad = torch.zeros(shape, dtype=dtype, device=parameter.device)
            self._transport.all_reduce(grad, "tied_grad")
            if self._transport.mesh.stage in self._users[name]:
                self._add(name, parameter, grad)

    def _start_ready(self) -> None:
        """Start the sums whose turn it is: all ranks must take them in the same order."""
        while self._order and self._order[0] in self._ready:
            name = self._order.pop(0)
            self._start(name, self._own[name])

    def _start(self, name: str, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        flat = torch.zeros_like(parameter) if grad is None else grad
        is_used = flat.new_tensor([0.0 if grad is None else 1.0])  # a parameter may have no use
        total = torch.cat([flat.flatten(), is_used])
        wait = self._transport.start_sum_over_shards(total, "weight_grad", num_flags=1)

        def finish() -> None:
            wait()
            summed = total[:-1].view_as(parameter) if total[-1] else None
            self._add(name, parameter, summed)

        self._finish[name] = finish

    def _add(self, name: str, parameter: nn.Parameter, grad: Tensor | None) -> None:
        both = [one for one in (self._before[name], grad) if one is not None]
        parameter.grad = both[0] + both[1] if len(both) == 2 else next(iter(both), None)

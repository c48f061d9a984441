"""Weights that are carried forward, in plain torch."""

from __future__ import annotations

from torch import Tensor, nn


class Lookahead:
    """Has a step in chunks computed with weights further on, as far as the last step goes on.

    Args:
        net: The net.
        num_steps: How many steps are foreseen.
    """

    def __init__(self, net: nn.Module, num_steps: int) -> None:
        self.net, self.num_steps = net, num_steps
        self.weights: list[dict[str, Tensor]] = []  # of the steps in chunks since an exact one
        self.jumps: list[float] = []

    def begin(self) -> None:
        """Begin a step in chunks."""
        self.weights.append({n: p.detach().clone() for n, p in self.net.named_parameters()})
        if len(self.weights) < 3:
            return
        older, old, now = self.weights[-3:]
        for name in now:
            step, before = now[name] - old[name], old[name] - older[name]
            squares = [float((x * x).sum()) for x in (step, before)]
            share = max(0.0, float((step * before).sum()) / max(*squares, 1e-300))
            jump = sum(share**i for i in range(1, self.num_steps + 1))
            self.jumps.append(jump)
            self.net.get_parameter(name).data = now[name] + jump * step

    def end(self, *, is_exact: bool) -> None:
        """Give the net its weights back; after an exact step there are none to go on from."""
        if is_exact:
            self.weights = []
            return
        for name, weight in self.weights[-1].items():
            self.net.get_parameter(name).data = weight.clone()

"""Weights that are carried forward, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class Lookahead:
    """Has a step in chunks computed with weights on the line through the last two.

    Args:
        net: The net.
        distances: How many steps each parameter is carried, behind the present one.
    """

    def __init__(self, net: nn.Module, distances: Mapping[str, float]) -> None:
        self.net, self.distances = net, distances
        self.weights: dict[str, Tensor] = {}  # of the last step, if it was in chunks

    def begin(self) -> None:
        """Begin a step in chunks."""
        own = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        last, self.weights = self.weights or own, own
        for name, distance in self.distances.items():
            ahead = own[name] + distance * (own[name] - last[name])
            self.net.get_parameter(name).data = ahead

    def end(self, *, is_exact: bool) -> None:
        """Give the net its weights back; after an exact step there are none to go on from."""
        if is_exact:
            self.weights = {}
        for name, weight in self.weights.items():
            self.net.get_parameter(name).data = weight.clone()

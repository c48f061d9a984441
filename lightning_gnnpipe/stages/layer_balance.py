"""Assigns consecutive layers to stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_gnnpipe.errors import ConfigError, explain


def solve_balance(
    costs: Sequence[float], num_stages: int, first_costs: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the layers per stage that minimize the largest cost of a stage.

    Dynamic programming. Ties give the earlier stages fewer layers. `costs`: per layer, any unit, at
    least 0. `first_costs`: extra cost of a stage that begins with the layer.
    """
    num_layers = len(costs)
    check_num_stages(num_layers, num_stages)
    total = [0.0, *accumulate(costs)]
    extra = [0.0] * num_layers if first_costs is None else first_costs
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(stage, num_layers + 1):
            for start in range(stage - 1, end):
                own = total[end] - total[start] + extra[start]
                slowest = max(best[stage - 1][start], own)
                if slowest < best[stage][end]:
                    best[stage][end], cut[stage][end] = slowest, start
    counts: list[int] = []
    end = num_layers
    for stage in range(num_stages, 0, -1):
        counts.append(end - cut[stage][end])
        end = cut[stage][end]
    return tuple(reversed(counts))


def check_counts(counts: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return `counts` as a tuple; raise `ConfigError` if they do not fit layers and stages."""
    check_num_stages(num_layers, num_stages)
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_layers:
        raise ConfigError(
            explain(
                expected=f"'balance' to assign {num_layers} layers to {num_stages} stages, one "
                "at least to each",
                found=f"{list(counts)}, {len(counts)} stages and {sum(counts)} layers",
                remedy="Correct the counts, or use balance='measured'.",
            )
        )
    return tuple(counts)


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Raise `ConfigError` if there are more stages than layers."""
    if num_stages > num_layers:
        raise ConfigError(
            explain(
                expected="at least one layer for each stage",
                found=f"{num_stages} stages and {num_layers} layers that can be cut apart",
                remedy=f"Train on {num_layers} device{'s' if num_layers > 1 else ''} at the most, "
                "or use a deeper model.",
            )
        )


def check_num_virtual(num_layers: int, num_ranks: int, num_virtual: int) -> None:
    """Raise `ConfigError` if all ranks together have more virtual stages than layers."""
    if num_virtual > 1 and num_ranks * num_virtual > num_layers:
        raise ConfigError(
            explain(
                expected="at least one layer for each stage",
                found=f"{num_ranks} ranks of {num_virtual} stages, and {num_layers} layers that "
                "can be cut apart",
                remedy=f"Use num_virtual={max(num_layers // num_ranks, 1)}, or a deeper model.",
            )
        )

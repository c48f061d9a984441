"""Making chunks weigh the same by moving the nodes whose move cuts the fewest edges."""

from __future__ import annotations

import torch
from torch import Tensor

_TOLERANCE = 0.05


def rebalance(assignment: Tensor, weights: Tensor, links: Tensor, num_chunks: int) -> Tensor:
    """Return `assignment` without empty chunks, none over 5 % above the mean where it can be.

    What is compared is weight. Repeatedly takes nodes from the heaviest chunk to the lightest,
    those first that have more links there and fewer here. Deterministic; each round makes the
    heaviest chunk lighter.

    Args:
        assignment: `[num_nodes]` chunk numbers.
        weights: `[num_nodes]` integer weights.
        links: `[2, num_links]` joined nodes, in both directions.
        num_chunks: Chunks, K.
    """
    assignment = _fill_empty(assignment.clone(), num_chunks)
    loads = torch.bincount(assignment, weights.double(), minlength=num_chunks)
    mean = float(loads.mean())
    limit = (1 + _TOLERANCE) * mean
    for _ in range(2 * assignment.numel()):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        if float(loads[heavy]) <= limit:
            break
        budget = min(float(loads[heavy]) - mean, mean - float(loads[light]))
        given = _choose(assignment, weights, links, (heavy, light), budget)
        taken = given[:0]
        if given.numel() == 0:
            given, taken = _swap(assignment, weights, (heavy, light), budget)
        if given.numel() == 0:
            given = _single(assignment, weights, heavy, float(loads[heavy] - loads[light]))
        if given.numel() == 0:
            break
        assignment[given], assignment[taken] = light, heavy
        weight = float(weights[given].sum() - weights[taken].sum())
        loads[heavy] -= weight
        loads[light] += weight
    return assignment


def _choose(
    assignment: Tensor, weights: Tensor, links: Tensor, pair: tuple[int, int], budget: float
) -> Tensor:
    """Return nodes of the heavy chunk that weigh at most `budget` together, the best first."""
    heavy, light = pair
    nodes = (assignment == heavy).nonzero().flatten()
    is_from = assignment[links[0]] == heavy
    here, there = links[0][is_from], assignment[links[1][is_from]]
    count = assignment.numel()
    gain = torch.bincount(here[there == light], minlength=count)
    gain -= torch.bincount(here[there == heavy], minlength=count)
    fitting = nodes[weights[nodes] <= budget]
    order = fitting[gain[fitting].argsort(descending=True, stable=True)]
    return order[weights[order].cumsum(0) <= budget][: nodes.numel() - 1]


def _swap(
    assignment: Tensor, weights: Tensor, pair: tuple[int, int], budget: float
) -> tuple[Tensor, Tensor]:
    """Return a node of each chunk whose weights differ by as much of `budget` as can be."""
    nodes = [(assignment == chunk).nonzero().flatten() for chunk in pair]
    kinds = [torch.unique(weights[some]) for some in nodes]
    gains = (kinds[0].view(-1, 1) - kinds[1].view(1, -1)).double()
    gains[(gains > budget) | (gains <= 0)] = 0
    if gains.numel() == 0 or float(gains.max()) == 0:
        return nodes[0][:0], nodes[1][:0]
    row, column = divmod(int(gains.argmax()), gains.size(1))
    given = nodes[0][weights[nodes[0]] == kinds[0][row]][:1]
    taken = nodes[1][weights[nodes[1]] == kinds[1][column]][:1]
    return given, taken


def _single(assignment: Tensor, weights: Tensor, heavy: int, gap: float) -> Tensor:
    """Return the lightest node of the heavy chunk if moving it lowers the heavier of the two."""
    nodes = (assignment == heavy).nonzero().flatten()
    node = nodes[weights[nodes].argmin()]
    return node.view(1) if nodes.numel() > 1 and float(weights[node]) < gap else nodes[:0]


def _fill_empty(assignment: Tensor, num_chunks: int) -> Tensor:
    counts = torch.bincount(assignment, minlength=num_chunks)
    for chunk in (counts == 0).nonzero().flatten().tolist():
        crowded = int(counts.argmax())
        node = (assignment == crowded).nonzero()[-1]
        assignment[node] = chunk
        counts[crowded] -= 1
        counts[chunk] = 1
    return assignment

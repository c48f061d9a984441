"""Sample a few graphs of a batch, to find out what the dimensions of traced values count.

Graphs keep all their nodes, since models with a fixed number of nodes per graph reshape
`[num_graphs * num_nodes, channels]`. The same graph may be taken several times.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls.call import Call
from lightning_gnnpipe.calls.graph_batch import GraphBatch, GraphRows, Kind
from lightning_gnnpipe.calls.kinds import Inputs
from lightning_gnnpipe.errors import GraphError

_MAX_GRAPHS = 24
_MAX_DROPPED = 4

Drawn = tuple[tuple[Tensor, ...], GraphBatch]


def draw_graphs(module: nn.Module, call: Call, inputs: Inputs) -> Drawn:
    """Return the leaves and the batch of a few graphs, the largest and middle-sized ones.

    If possible, the numbers of nodes, edges and graphs differ from each other and from the widths
    of `module`'s parameters. Where graphs have as many edges as nodes, the last edges are dropped.
    """
    graphs = inputs.graphs
    assert graphs is not None
    if not any(graphs.sizes):
        raise GraphError(
            expected="at least one graph with nodes in the batch",
            found=f"{graphs.num_graphs} empty graphs",
            remedy="Remove empty graphs, or put a graph with nodes into the first batch.",
        )
    widths = {size for p in module.parameters() for size in p.shape}
    edge_sets = {
        number
        for kind, number in zip(inputs.kinds, inputs.edge_sets, strict=True)
        if kind is Kind.EDGE_INDEX
    }
    can_drop = edge_sets == set(range(len(graphs.row_sets)))
    for num_dropped in range(_MAX_DROPPED if can_drop else 1):
        for count in range(3, _MAX_GRAPHS):
            drawn = _draw(call, graphs, count, num_dropped)
            if _sizes_are_distinct(drawn[1], widths):
                return drawn
    return _draw(call, graphs, 3, 0)


def _draw(call: Call, graphs: GraphBatch, count: int, num_dropped: int) -> Drawn:
    """Return `count` graphs with nodes, plus empty ones if the batch has any."""
    work = graphs.work()
    filled = [graph for graph, size in enumerate(graphs.sizes) if size]
    filled.sort(key=lambda graph: (work[graph], graph))
    taken = [filled[-1]] + [filled[(len(filled) // 2 + i) % len(filled)] for i in range(count - 1)]
    inner = [graph for graph in range(graphs.num_filled) if not graphs.sizes[graph]]
    if inner and max(graphs.sizes) == 1:  # else there are as many nodes as graphs
        taken[1:1] = inner[:1] * (1 + count % 3)
    num_filled = len(taken)
    num_empty = (1 + count % 3) if graphs.num_filled < graphs.num_graphs else 0
    taken += [graphs.num_graphs - 1] * num_empty
    rows = GraphRows(graphs, taken)
    device = graphs.graph_of_node.device
    numbers = torch.arange(len(taken))
    row_sets, keeps = [], []
    for number in range(len(graphs.row_sets)):
        owner = numbers.repeat_interleave(rows.starts(Kind.EDGE, number).diff())
        keep = max(len(owner) - num_dropped * (number + 1), 0)
        row_sets.append(owner[:keep].to(device))
        keeps.append(keep)
    leaves, hows = [], []
    for leaf, how in zip(call.leaves, graphs.leaves, strict=True):
        part = rows.take(leaf, how, (0, len(taken)))
        if how.kind is Kind.EDGE:
            part = part.narrow(how.dim, 0, keeps[how.number])
        part = part.clone() if part.is_inference() else part
        leaves.append(part.detach().requires_grad_(leaf.requires_grad))
        if how.counts is not None:
            counts = how.counts[torch.tensor(taken, device=how.counts.device)]
            how = replace(how, increments=counts.cumsum(0) - counts, counts=counts)
        hows.append(how)
    sizes = tuple(graphs.sizes[graph] for graph in taken)
    of_node = numbers.repeat_interleave(torch.tensor(sizes)).to(device)
    sample = GraphBatch(len(taken), num_filled, sizes, of_node, tuple(row_sets), tuple(hows))
    return tuple(leaves), sample


def _sizes_are_distinct(sample: GraphBatch, widths: Collection[int]) -> bool:
    """Whether the sizes of `sample` identify what a dimension counts."""
    sizes = [len(sample.graph_of_node), *map(len, sample.row_sets)]
    sizes += [size for size, _ in sample.row_counts]
    return len(set(sizes)) == len(sizes) and not set(sizes) & {2, *widths}  # 2: rows of edge_index

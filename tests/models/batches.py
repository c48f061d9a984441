"""Mini-batches of graphs, and networks for them traced as this library does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx, nn
from torch_geometric.data import Batch, Data

from lightning_gnnpipe.calls import flatten_call
from lightning_gnnpipe.stages import trace
from lightning_gnnpipe.stages.trace import root_of

EXACT = dict(rtol=1e-10, atol=1e-10)


def draw_graphs(sizes: Sequence[int], channels: int, seed: int = 0) -> list[Data]:
    """Return a graph of each size, with random features and random edges, in float64."""
    draw = torch.Generator().manual_seed(seed)
    graphs = []
    for size in sizes:
        x = torch.randn(size, channels, generator=draw, dtype=torch.float64)
        edge_index = torch.randint(size, (2, 2 * size), generator=draw)
        graphs.append(Data(x=x, edge_index=edge_index))
    return graphs


def join(graphs: Sequence[Data]) -> Data:
    return Batch.from_data_list(list(graphs))


def draw_images(number: int, grid: tuple[int, int], channels: int, seed: int = 0) -> list[Data]:
    return draw_graphs([grid[0] * grid[1]] * number, channels, seed)


def trace_net(net: nn.Module, *args: Tensor) -> Callable[..., Tensor]:
    """Return the network traced for these arguments; it takes those of any mini-batch."""
    traced = fx.GraphModule(root_of(net), trace(net, flatten_call(net, args, {}))[0])
    numbers = [node for node in traced.graph.nodes if node.target == "leaf_num_graphs"]

    def run(*args: Tensor) -> Tensor:
        [graph_of_node] = (arg for arg in args if arg.dim() == 1 and not arg.is_floating_point())
        return traced(*args, *(int(graph_of_node.max()) + 1 for _ in numbers))

    return run

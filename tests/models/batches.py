"""Mini-batches of graphs, and how networks for them are compared with their formulas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

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


def assert_same_gradients(net: nn.Module, found: Tensor, expected: Tensor) -> None:
    """Compare those of all parameters, none of which goes without."""
    names, parameters = zip(*net.named_parameters(), strict=True)
    ours, theirs = (
        torch.autograd.grad(out.square().sum(), parameters) for out in (found, expected)
    )
    for name, one, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **EXACT, msg=lambda text, n=name: f"{n}: {text}")

"""Sums and attention over all nodes: behind the last layer works, between layers refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe.errors import UnsupportedError
from tests.helpers.alike import D, N, assert_alike, fit
from tests.helpers.trainers import weights

pytestmark = pytest.mark.usefixtures("double")


class Between(nn.Module):
    """A function of all rows between two layers, in forward itself or in a module."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, is_inline: bool = True) -> None:
        super().__init__()
        self.first, self.last = gnn.GCNConv(D, 6), gnn.GCNConv(6, 3)
        self.function = function if is_inline else Wrapped(function)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).tanh()
        return self.last(x + self.function(x), edge_index)


class Wrapped(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "sum": lambda x: torch.sum(x, dim=0, keepdim=True) / x.size(0),
    "std": lambda x: (x - 1) / x.std(0),
    "max": lambda x: x.amax(dim=0),
    "norm": lambda x: x / x.norm(),
    "matmul": lambda x: x @ (x.t() @ x) / 9,
    "einsum": lambda x: x @ torch.einsum("nd,nf->df", x, x) / 9,
    "pool": lambda x: gnn.global_mean_pool(x, None),
    "softmax": lambda x: torch.softmax(x @ x.t(), dim=-1) @ x,
}
NAMES = {"max": "amax", "pool": "global_mean_pool", "softmax": "matmul"}


@pytest.mark.parametrize("name", SUMS)
def test_what_combines_all_nodes_between_layers_is_refused_in_words(name: str) -> None:
    words = rf"all nodes between layers, by '{NAMES.get(name, name)}' at test_attention(.|\n)*Pool"
    with pytest.raises(UnsupportedError, match=words):
        fit(lambda: Between(SUMS[name]), num_chunks=3)


@pytest.mark.parametrize("function", [SUMS["mean"], lambda x: x * torch.softmax(x, dim=0)])
def test_in_a_module_the_check_of_values_refuses_it(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedError, match=r"all nodes between layers|same values on chunks"):
        fit(lambda: Between(function, is_inline=False), num_chunks=3)


def test_one_chunk_may_combine_all_nodes() -> None:
    plain, exact = (fit(lambda: Between(SUMS["softmax"]), num_chunks=n) for n in (0, 1))
    torch.testing.assert_close(weights(exact), weights(plain), rtol=0, atol=1e-9)


class Attends(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.last = gnn.GCNConv(D, 8), gnn.GCNConv(8, 3)
        self.attention = attention

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        return self.last(self.attention(x.unsqueeze(0)).squeeze(0), edge_index)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gnn.attention.SGFormerAttention(8, head_channels=8),
        lambda: gnn.attention.PerformerAttention(8, heads=2),
        lambda: gnn.attention.PolynormerAttention(8, heads=2, head_channels=4),
    ],
)
def test_attention_over_all_nodes_between_layers_is_refused_in_words(make: Any) -> None:
    with pytest.raises(UnsupportedError, match="all nodes between layers, by 'attention'"):
        fit(lambda: Attends(make()), num_chunks=3)


def test_gps_layers_are_refused() -> None:
    gps = gnn.GPSConv(D, gnn.GCNConv(D, D), attn_type="performer")
    with pytest.raises(UnsupportedError, match="GPSConv: its attention runs over all nodes"):
        fit(lambda: gnn.Sequential("x, edge_index", [(gps, "x, edge_index -> x")]), num_chunks=3)


def of_one_graph(net: Any, data: Data) -> Any:
    return net(data.x, data.edge_index, torch.zeros(N, dtype=torch.int64))


def test_attention_beside_the_layers_runs_on_all_rows() -> None:
    options = {"trans_dropout": 0.0, "gnn_dropout": 0.0}
    assert_alike(lambda: gnn.SGFormer(D, 8, 3, **options), of_one_graph)

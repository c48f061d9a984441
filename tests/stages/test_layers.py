"""Cutting traced models into layers: where the cuts lie, what crosses them, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe.calls import Call, Kind, classify, flatten_call
from lightning_gnnpipe.errors import ConfigError, GraphError, UnsupportedError
from lightning_gnnpipe.stages import (
    Layers,
    SampleRun,
    check_counts,
    cut_layers,
    draw_samples,
    find_pipelined,
    solve_balance,
    trace,
)
from tests.helpers.alike import net_of
from tests.helpers.engines import one_process_engine

N, D = 9, 4
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 2], [1, 2, 3, 4, 5, 6, 7, 0, 2, 0, 2]])


def layers_of(module: nn.Module, *args: object, **kwargs: object) -> Layers:
    call = flatten_call(module, args, kwargs)
    run = SampleRun(draw_samples(module, call, classify(call)), call)
    return cut_layers(trace(module, call, run), module, run.values)


class Residual(nn.Module):
    """x -> x + conv(relu(norm(x))): the cheap cut is behind the sum, where one tensor is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(D, 6), nn.Linear(6, 2)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.convs = nn.ModuleList(gnn.SAGEConv(6, 6) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(norm(x).relu(), edge_index)
        return self.decode(x)


class FirstStays(nn.Module):
    """GCNII's pattern: x_0 is read by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(D, D)
        self.convs = nn.ModuleList(gnn.GCN2Conv(D, 0.1, 0.5, i + 1) for i in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x_0 = self.encode(x)
        for conv in self.convs:
            x = conv(F.dropout(x, 0.5, self.training), x_0, edge_index).relu()
        return x


class EdgeStream(nn.Module):
    """Edge features that layers update cross the cuts with one row per edge."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GINEConv(nn.Linear(D, D), edge_dim=3) for _ in range(2))
        self.update = nn.Linear(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> dict[str, Tensor]:
        x = self.convs[0](x, edge_index, edge_attr)
        edge_attr = self.update(edge_attr).relu()
        return {"out": self.convs[1](x, edge_index, edge_attr), "hidden": x}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(D, D) for _ in range(2))


def test_the_cut_lies_where_the_fewest_bytes_cross_and_what_is_alive_crosses() -> None:
    def crossing(module: nn.Module) -> list[list[str]]:
        return [list(names) for names in layers_of(module, torch.randn(N, D), EDGES).crossing]

    found = crossing(Residual())
    assert [len(names) for names in found] == [0, 1, 1]
    assert all("add" in name for names in found[1:] for name in names)
    assert [len(names) for names in crossing(FirstStays())] == [0, 2, 2]
    assert [len(names) for names in crossing(gnn.GCN(D, 5, 4, 3, jk="cat"))] == [0, 1, 2, 3]
    layers = layers_of(EdgeStream(), torch.randn(N, D), EDGES, torch.randn(EDGES.size(1), 3))
    kinds = {layers.values[name].kind for name in layers.crossing[1]}
    assert kinds <= {Kind.NODE, Kind.EDGE} and Kind.NODE in kinds


class OfData(nn.Module):
    def forward(self, data: Data) -> Any:
        return data.x


def test_inputs_are_told_apart() -> None:
    def flat(num_nodes: int, num_attrs: int) -> Call:
        attr = torch.randn(num_attrs, 3)
        return flatten_call(EdgeStream(), (torch.randn(num_nodes, D), EDGES), {"edge_attr": attr})

    for num_nodes in (N, 11):
        kinds = classify(flat(num_nodes, 11)).kinds
        assert kinds == (Kind.NODE, Kind.EDGE_INDEX, Kind.EDGE)
    with pytest.raises(GraphError, match="'edge_attr' to have one row for each of the 11 edges"):
        classify(flat(N, 10))
    data = Data(torch.randn(N, D), EDGES, edge_weight=torch.ones(3))  # forward may not read it
    kinds = classify(flatten_call(OfData(), (data,), {})).kinds
    assert kinds == (Kind.NODE, Kind.EDGE_INDEX, Kind.WHOLE)
    with pytest.raises(UnsupportedError, match="a dense tensor or a sparse matrix"):
        bsr = torch.eye(N + 1).to_sparse_bsr((2, 2))
        flatten_call(EdgeStream(), (torch.randn(N, D), bsr, bsr), {})


def test_the_pipelined_module_is_the_smallest_with_all_message_passing() -> None:
    root = nn.Module()
    root.encode = nn.Linear(D, D)
    root.net = Residual()
    assert find_pipelined(root, None)[:2] == ("net", root.net)
    root.head = gnn.GCNConv(D, D)
    with pytest.raises(UnsupportedError, match=r"Message passing is in 'net' and 'head'"):
        find_pipelined(root, None)
    assert find_pipelined(root, "net")[:2] == ("net", root.net)
    whole = net_of(
        nn.Module,
        lambda self, x, edge_index: self.head(self.net(x, edge_index), edge_index),
        net=lambda: root.net,
        head=lambda: root.head,
    )()
    assert find_pipelined(whole, None)[:2] == ("", whole)
    root.head.requires_grad_(False)
    assert find_pipelined(root, None)[:2] == ("net", root.net)
    assert find_pipelined(whole, None)[:2] == ("", whole)
    del root.head
    for alias in (root.net.convs, nn.ModuleList(root.net.convs), root.net.convs[0], root.net):
        root.alias = alias
        assert find_pipelined(root, None)[:2] == ("net", root.net)
    with pytest.raises(ConfigError, match="'pipelined_module' to name a submodule"):
        find_pipelined(root, "nets")
    with pytest.raises(UnsupportedError, match=r"has no message-passing layer(.|\n)*SimpleConv"):
        find_pipelined(nn.Linear(2, 2), None)


def test_counts_that_do_not_fit_are_refused() -> None:
    assert solve_balance([1, 1, 1, 1], 2) == check_counts([2, 2], 4, 2) == (2, 2)
    with pytest.raises(ConfigError, match="3 stages and 2 layers"):
        solve_balance([1, 1], 3)
    with pytest.raises(
        ConfigError, match=r"'balance' to have one number of layers for each stage \(2\)"
    ):
        check_counts([2, 2], 3, 2)


def brute_force(costs: list[float], num_stages: int, firsts: list[float]) -> float:
    if num_stages == 1:
        return sum(costs) + firsts[0]
    return min(
        max(sum(costs[:i]) + firsts[0], brute_force(costs[i:], num_stages - 1, firsts[i:]))
        for i in range(1, len(costs) - num_stages + 2)
    )


@pytest.mark.parametrize("seed", range(20))
def test_balance_equals_brute_force(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_layers = int(torch.randint(1, 9, (), generator=generator))
    num_stages = int(torch.randint(1, num_layers + 1, (), generator=generator))
    costs = torch.rand(num_layers, generator=generator).tolist()
    firsts = torch.rand(num_layers, generator=generator).tolist()
    for first_costs in (None, firsts):
        extra = first_costs or [0.0] * num_layers
        counts, start, slowest = solve_balance(costs, num_stages, first_costs), 0, 0.0
        for count in counts:
            own = extra[start] + sum(costs[start : start + count])
            slowest, start = max(slowest, own), start + count
        assert slowest == pytest.approx(brute_force(costs, num_stages, extra))


def test_outputs_can_be_written_to() -> None:
    """Dicts and lists in a traced output are immutable; those of a plain module are not."""

    def nested(self: Any, x: Tensor, edge_index: Tensor) -> dict[str, Any]:
        x = self.convs[0](x, edge_index)
        return {"out": x, "all": [x, (x.relu(), x.tanh())]}

    engine = one_process_engine(net_of(Two, nested)(), partition=torch.zeros(N, dtype=torch.int64))
    output = engine.forward((torch.randn(N, D), EDGES), {})
    assert isinstance(output, dict)
    output["more"] = output["all"].pop()
    assert type(output["more"]) is tuple

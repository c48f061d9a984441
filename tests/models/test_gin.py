"""GIN: the formula on small molecules, which is of each graph by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.models import GIN
from tests.helpers.batches import EXACT, NUM_EDGE_FEATURES, NUM_FEATURES, assert_same, draw_batch

ATOM_VALUES, BOND_VALUES = (5, 3), (4, 2)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"edge_channels": BOND_VALUES},
    {"edge_channels": BOND_VALUES, "virtual_node": True},
    {"virtual_node": True, "jk": "cat", "pool": "sum"},
    {"edge_channels": BOND_VALUES, "jk": "max", "pool": "max"},
]


def build(num_layers: int = 3, **options: Any) -> GIN:
    torch.manual_seed(0)
    net = GIN(ATOM_VALUES, 8, 2, num_layers, **({"dropout": 0.0} | options)).double()
    if net.virtual is not None:
        torch.nn.init.normal_(net.virtual)
    for layer in net.layers:
        torch.nn.init.normal_(layer.conv.eps)
    return net


@pytest.fixture
def molecules() -> list[Data]:
    """A ring 0-1-2-0 with a tail 2-3; one atom alone; two bonds in a row, atom 3 apart."""
    draw = torch.Generator().manual_seed(0)

    def columns(number: int, values: tuple[int, ...]) -> Tensor:
        drawn = [torch.randint(top, (number,), generator=draw) for top in values]
        return torch.stack(drawn, dim=1)

    molecules = []
    for size, bonds in ((4, [(0, 1), (1, 2), (2, 0), (2, 3)]), (1, []), (4, [(0, 1), (1, 2)])):
        one_way = torch.tensor(bonds, dtype=torch.long).view(-1, 2).t()
        edge_attr = columns(len(bonds), BOND_VALUES)
        molecules.append(
            Data(
                x=columns(size, ATOM_VALUES),
                edge_index=torch.cat([one_way, one_way.flip(0)], dim=1),
                edge_attr=torch.cat([edge_attr, edge_attr]),
            )
        )
    return molecules


def call(net: GIN, graphs: list[Data]) -> Tensor:
    batch = Batch.from_data_list(graphs)
    edge_attr = None if net.layers[0].edge_encoder is None else batch.edge_attr
    return net(batch.x, batch.edge_index, batch.batch, edge_attr)


def compute_gin(net: GIN, graph: Data, jk: str | None, pool: str) -> Tensor:
    """Return the logits of one graph, its atoms and bonds one by one."""

    def encode(tables, row):
        return sum(table.weight[value] for table, value in zip(tables, row, strict=True))

    rows = [encode(net.encoder.tables, atom) for atom in graph.x]
    virtual = net.virtual[0] if net.virtual is not None else None
    outputs = []
    for number, layer in enumerate(net.layers):
        if virtual is not None:
            rows = [row + virtual for row in rows]
        sums = [(1 + layer.conv.eps) * row for row in rows]
        for edge, (source, target) in enumerate(graph.edge_index.t().tolist()):
            message = rows[source]
            if layer.edge_encoder is not None:
                bond = encode(layer.edge_encoder.tables, graph.edge_attr[edge])
                message = (message + bond).clamp(min=0)
            sums[target] = sums[target] + message
        first, norm, _, second = layer.conv.nn
        hidden = [norm(first(row)).clamp(min=0) for row in sums]
        out = [layer.after[0](second(row).view(1, -1))[0] for row in hidden]
        if number < len(net.layers) - 1:
            out = [row.clamp(min=0) for row in out]
            if virtual is not None:
                virtual = net.updates[number].mlp(virtual + sum(rows))
        rows = out
        outputs.append(torch.stack(rows))
    nodes = {"cat": lambda: torch.cat(outputs, dim=1), "max": lambda: torch.stack(outputs).amax(0)}
    last = nodes[jk]() if jk else outputs[-1]
    pooled = {"mean": last.mean(0), "sum": last.sum(0), "max": last.amax(0)}[pool]
    return net.head.lin(pooled)


@pytest.mark.parametrize("options", OPTIONS)
def test_gin_is_its_formula(options, molecules):
    net = build(**options)
    jk, pool = options.get("jk"), options.get("pool", "mean")
    expected = torch.stack([compute_gin(net, molecule, jk, pool) for molecule in molecules])
    found = call(net, molecules)
    assert_same(net, found, expected)
    assert len([m for m in net.modules() if isinstance(m, MessagePassing)]) == 3


def test_plain_features_go_through_linear_maps():
    torch.manual_seed(0)
    net = GIN(NUM_FEATURES, 8, 2, 1, 0.0, edge_channels=NUM_EDGE_FEATURES).double()
    graph = draw_batch([4])
    layer, h = net.layers[0], net.encoder(graph.x)
    out = (1 + layer.conv.eps) * h
    for (source, target), bond in zip(graph.edge_index.t().tolist(), graph.edge_attr, strict=True):
        change = torch.zeros_like(out)
        change[target] = (h[source] + layer.edge_encoder(bond)).relu()
        out = out + change
    expected = net.head.lin(layer.after(layer.conv.nn(out)).mean(dim=0))
    logits = net(graph.x, graph.edge_index, graph.batch, graph.edge_attr)
    torch.testing.assert_close(logits[0], expected, **EXACT)


def test_graphs_without_nodes_have_logits_of_their_own(molecules):
    net = build(virtual_node=True)
    batch = Batch.from_data_list(molecules)
    skipping = batch.batch + (batch.batch > 0)  # none of graph 1
    logits = net(batch.x, batch.edge_index, skipping)
    torch.testing.assert_close(logits[[0, 2, 3]], call(net, molecules), **EXACT)
    torch.testing.assert_close(logits[1], net.head.lin.bias, **EXACT)


def test_features_that_do_not_fit_the_encoders_are_refused(molecules):
    batch = Batch.from_data_list(molecules)
    args = batch.x, batch.edge_index, batch.batch
    with pytest.raises(ValueError, match=r"Expected 'edge_attr' if.*\(got none\)"):
        build(edge_channels=BOND_VALUES)(*args)
    with pytest.raises(ValueError, match=r"Expected 'edge_attr' if.*\(got features\)"):
        build()(*args, batch.edge_attr)
    batch.x[0, 1] = ATOM_VALUES[1]
    with pytest.raises(IndexError):
        build()(*args)

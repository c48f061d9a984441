"""Uses of layers in which a shortcut would be silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.passing import aggregate, edges
from tests.engine.test_gradients import CHUNKS, WHOLE, Batch, D, make_batch
from tests.helpers import alike
from tests.helpers.engines import one_process_engine
from tests.helpers.trainers import quiet_trainer, weights

UPSTREAM = {"flow": "target_to_source"}


def step(engine: PipelineEngine, number: int, batch: Batch) -> Tensor:
    engine.set_step(step_index=number)
    found = engine.forward((), batch)
    found.sum().backward()
    return found.detach()


class Weighted(nn.Module):
    """A layer on edges in some direction, with weights that are learned."""

    def __init__(self, conv: nn.Module, is_flipped: bool) -> None:
        super().__init__()
        self.conv, self.lin, self.is_flipped = conv, nn.Linear(1, 1), is_flipped

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        weight = self.lin(edge_weight[:, None]).sigmoid().squeeze(-1)
        return self.conv(x, edge_index.flip(0) if self.is_flipped else edge_index, weight)


@pytest.mark.parametrize("is_flipped", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: gnn.GraphConv(D, D),
        lambda: gnn.GraphConv(D, D, **UPSTREAM),
        lambda: gnn.GCNConv(D, D, **UPSTREAM),
        lambda: gnn.ChebConv(D, D, K=2, **UPSTREAM),
        lambda: gnn.GATConv(D, D, edge_dim=1, **UPSTREAM),
    ],
)
def test_one_chunk_is_pyg_in_any_direction(make: Callable[[], nn.Module], is_flipped: bool) -> None:
    torch.manual_seed(0)
    batch, net = make_batch(), Weighted(make(), is_flipped)
    expected = net(**batch)
    found = one_process_engine(net, partition=WHOLE).forward((), batch)
    torch.testing.assert_close(found, expected)


def weighted(*before: Any) -> nn.Module:
    """Return a layer with edge weights, after what is done `before`."""
    layers = [*before, (gnn.GCNConv(D, D), "x, edge_index, edge_weight -> x")]
    return gnn.Sequential("x, edge_index, edge_weight", layers)


@pytest.mark.parametrize("partition", [WHOLE, CHUNKS])
def test_overwritten_edge_weights_count_in_every_mode(partition: Tensor) -> None:
    clamp = (lambda weight: weight.clamp_(max=0.3)), "edge_weight -> edge_weight"
    batch, net = make_batch(), weighted(clamp)
    expected = net(**{**batch, "edge_weight": batch["edge_weight"].clone()}).detach()
    engine = one_process_engine(net, partition=partition)
    for number in range(2):
        torch.testing.assert_close(step(engine, number, batch), expected)
    net.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(engine.forward((), batch), expected)


def test_edge_weights_that_begin_to_need_gradients_are_exact_once() -> None:
    batch, net = make_batch(), weighted()
    engine = one_process_engine(net, partition=CHUNKS)
    expected = net(**batch).detach()
    for number in range(5):
        batch["edge_weight"].requires_grad_(number >= 2)
        torch.testing.assert_close(step(engine, number, batch), expected)
    assert batch["edge_weight"].grad is not None


def test_weights_are_normalised_once_and_layers_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights in an exact step; four layers there, and on each chunk in the next."""
    made: list[type] = []
    for kind in (edges.WholeEdges, aggregate.BoundSum):

        def count(self: Any, *args: Any, init: Any = kind.__init__) -> None:
            made.append(type(self))
            init(self, *args)

        monkeypatch.setattr(kind, "__init__", count)
    calls = [f"x, edge_index, {name} -> x" for name in ("edge_weight", "edge_2") * 2]
    layers = [(gnn.GCNConv(D, D), call) for call in calls]
    net, batch = gnn.Sequential("x, edge_index, edge_weight, edge_2", layers), make_batch()
    batch["edge_2"] = batch["edge_weight"] + 1
    engine = one_process_engine(net, partition=CHUNKS)
    for number in range(6):
        if number == 3:
            batch["edge_2"] = batch["edge_2"] + 1
        made.clear()
        torch.testing.assert_close(step(engine, number, batch), net(**batch).detach())
        counts = made.count(edges.WholeEdges), made.count(aggregate.BoundSum)
        num_chunks = int(CHUNKS.max()) + 1
        expected = (1, 4), (0, 4 * num_chunks), (0, 0)
        assert number == 0 or counts == expected[number % 3]  # before the first is the self-check


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("conv", [gnn.GCNConv, gnn.SAGEConv, gnn.TAGConv, gnn.GraphConv])
@pytest.mark.parametrize("partition", [WHOLE, CHUNKS])
def test_half_precision_by_autocast(conv: Callable[..., nn.Module], partition: Tensor) -> None:
    convs = [(conv(D, D, bias=False), "x, edge_index -> x") for _ in range(2)]
    batch, net = make_batch(), gnn.Sequential("x, edge_index", [convs[0], nn.ReLU(), convs[1]])
    del batch["edge_weight"]
    engine = one_process_engine(net, partition=partition)
    for number in range(2):
        engine.set_step(step_index=number)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = engine.forward((), batch), net(**batch)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
        found.float().sum().backward()


def test_a_graph_of_one_node_and_one_edge() -> None:
    """As many nodes as edges: what has a row a node is told apart all the same."""
    conv = gnn.GINEConv(nn.Linear(D, D), edge_dim=2)
    layers = [(conv, "x, edge_index, edge_attr -> x"), nn.Linear(D, 3)]
    module = gnn.Sequential("x, edge_index, edge_attr", layers)
    edges = torch.zeros(2, 1, dtype=torch.int64)
    given = {"x": torch.randn(1, D), "edge_index": edges, "edge_attr": torch.rand(1, 2)}
    engine = one_process_engine(module, partition=torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(engine.forward((), given), module(**given))


class Iterates(nn.Module):
    """A power iteration behind its last layer updates buffers in each training pass."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(alike.D, alike.D) for _ in range(3))
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(alike.D, alike.D))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return self.lin(x)


def test_buffers_that_the_last_stage_updates_come_back() -> None:
    plain, ours = alike.fit(Iterates), alike.fit(Iterates, num_chunks=1, num_stages=2)
    expected = plain.state_dict()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9)


class Shares(Iterates):
    """Its first and last layers have one power iteration."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(self.lin(x), edge_index).tanh()
        return self.lin(x)


def test_a_buffer_that_several_stages_would_change_is_refused() -> None:
    words = (
        r"Several stages change the buffer 'lin.parametrizations.weight.0._[uv]'(.|\n)*devices=1"
    )
    with pytest.raises(ProcessRaisedException, match=words):
        alike.fit(Shares, num_chunks=1, num_stages=2)
    plain, ours = alike.fit(Shares), alike.fit(Shares, num_chunks=1)
    torch.testing.assert_close(weights(ours), weights(plain), rtol=0, atol=1e-9)


class Removes(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            parametrize.remove_parametrizations(module.net.lin, "weight")


def test_a_part_that_changes_buffers_may_go() -> None:
    found = []
    for piped, num_ranks in ((None, 1), ({"num_chunks": 1}, 1), ({"num_chunks": 1}, 2)):
        torch.manual_seed(0)
        module = alike.Fits(Iterates().double(), alike.on_features)
        loader = DataLoader([alike.graph()], batch_size=None)
        options: dict[str, Any] = {"max_epochs": 3, "callbacks": [Removes()]}
        quiet_trainer(num_ranks, piped, **options).fit(module, loader)
        found.append(weights(module))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-9)

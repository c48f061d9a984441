"""Exact passes in chunks: their numbers are compared with PyG's beside those of other passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe._compat_torch import DispatchMode
from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.stages import cut_module
from tests.engine.test_recompute import NETS, PARTITION
from tests.engine.test_recompute import graph as small_graph
from tests.helpers.cases import slow
from tests.helpers.engines import one_process_engine

N, E, D, CHUNKS = 1000, 8000, 16, 10


def graph() -> tuple[Tensor, Tensor]:
    number = torch.arange(E)
    edges = torch.stack([(number * 7 + number // N) % N, (number * 3 + 1) % N])
    return torch.sin(torch.arange(N * D).float()).view(N, D), edges


class Watch(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that an operation makes, and the most bytes alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.largest = self.total = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor):
                known = StorageWeakRef(one.untyped_storage())
                _, before = self.alive.get(known.cdata, (None, 0))
                self.alive[known.cdata] = known, one.untyped_storage().nbytes()
                self.total += self.alive[known.cdata][1] - before
                self.largest = max(self.largest, one.nbytes)
        if self.total > self.most:  # with those that are freed
            self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
            self.total = sum(size for _, size in self.alive.values())
            self.most = max(self.most, self.total)
        return result


@pytest.mark.parametrize("trains", [slow(False), True])
def test_less_is_alive(trains: bool) -> None:
    """No tensor has a row for each edge of the graph, and few have one for each node."""

    def watch(in_chunks: bool) -> Watch:
        torch.manual_seed(0)
        net = gnn.GAT(D, D, num_layers=6, heads=2).train(trains)
        partition = torch.arange(N) * CHUNKS // N
        engine = one_process_engine(net, partition=partition, exact_in_chunks=in_chunks)
        engine.controls.is_exact, inputs = True, graph()
        for turn in range(2):
            engine.set_step(step_index=turn)
            watched = Watch()
            with torch.set_grad_enabled(trains), watched:
                output = engine.forward(inputs, {})
                if trains:
                    output.sum().backward()
            del output
        return watched

    whole, chunks = watch(False), watch(True)
    assert chunks.most < whole.most / 2
    assert chunks.largest < whole.largest / 4


def test_the_same_under_autocast() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = (
                gnn.GATConv(D, D),
                gnn.GraphNorm(D),
                gnn.SAGEConv(D, D),
            )

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x, edge_index)).relu(), edge_index)

    found = []
    for in_chunks in (False, True):
        torch.manual_seed(0)
        net, partition = Net(), torch.arange(N) * CHUNKS // N
        engine = one_process_engine(net, partition=partition, exact_in_chunks=in_chunks)
        with torch.autocast("cpu", torch.bfloat16):
            output = engine.forward(graph(), {})
        output.float().square().sum().backward()
        found.append([output.detach(), *(p.grad for p in net.parameters())])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0.05, atol=0.05)
    for ours, theirs in zip(*found[::-1], strict=True):
        assert float((ours - theirs).norm()) <= 0.005 * float(theirs.norm()) + 0.05


@pytest.mark.usefixtures("double")
def test_gradients_are_of_the_dropped_rows() -> None:
    """Layers drop the same rows each time that they run, so differences of losses agree."""
    net, inputs = NETS["mixed"](), small_graph()
    weights = list(net.parameters())
    along = [torch.sin(torch.arange(p.numel()) + 1.0).view_as(p) for p in weights]

    def loss(shift: float) -> float:
        for weight, by in zip(weights, along, strict=True):
            weight.data += shift * by
        net.zero_grad()
        engine = one_process_engine(net, partition=PARTITION, exact_in_chunks=True)
        found = engine.forward(inputs, {}).sin().sum()
        found.backward()
        return float(found)

    ahead, behind = loss(1e-6), loss(-2e-6)
    loss(1e-6)
    slope = sum(float((p.grad * by).sum()) for p, by in zip(weights, along, strict=True))
    assert abs(slope) > 0.1
    assert abs((ahead - behind) / 2e-6 - slope) < 1e-5


@pytest.mark.parametrize("name", ["staleness", "history_dtype", "history_device", "cuda_graphs"])
def test_what_is_for_stale_steps_is_refused_on_one_stage(name: str) -> None:
    value = {"staleness": "constant", "history_dtype": "bfloat16", "history_device": "cpu"}
    with pytest.raises(ConfigError, match="with num_stages=1 and exact_in_chunks=True"):
        GNNPipeStrategy(num_stages=1, exact_in_chunks=True, **{name: value.get(name, True)})


def test_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="'exact_in_chunks' to be left out with graph_parallel=2"):
        GNNPipeStrategy(exact_in_chunks=True, graph_parallel=2)


class Tanh(gnn.MessagePassing):
    """Messages that are no weighted sum; its weights are those of `lin`, which it need not hold."""

    def __init__(self, lin: nn.Module | None = None) -> None:
        super().__init__()
        self.lins = [nn.Linear(WIDTH, WIDTH) if lin is None else lin]
        if lin is None:
            self.lin = self.lins[0]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lins[0](x))

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_i * x_j).tanh()


class Catching(Tanh):
    """Catches all that layers raise, and counts the calls of itself that run."""

    depth = 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.depth += 1
        with suppress(Exception):
            x = super().forward(x, edge_index) * self.depth
        self.depth -= 1
        return x


class Writing(Tanh):
    """Overwrites its input."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5), edge_index)


class Scaled(Tanh):
    """Reads a tensor that each step computes from a weight outside of the module."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x * SCALE[0], edge_index)


class Layers(nn.Module):
    """Layers one after the other; an encoder whose weights others may read."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.make(name) for name in names)

    def make(self, name: str) -> nn.Module:
        layers: dict[str, Callable[[], nn.Module]] = {
            "tanh": Tanh,
            "hidden": lambda: Tanh(self.lin),
            "hidden table": lambda: Tanh(HIDDEN),
            "scaled": Scaled,
            "catching": Catching,
            "writing": Writing,
            "gcn": lambda: gnn.GCNConv(WIDTH, WIDTH),
            "gat": lambda: gnn.GATConv(WIDTH, WIDTH),
            "tag": lambda: gnn.TAGConv(WIDTH, WIDTH, K=2),
            "norm": lambda: nn.BatchNorm1d(WIDTH),
            "norms inside": lambda: gnn.GINConv(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))
            ),
        }
        return layers[name]()

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, first = self.lin(x), None
        for layer in self.layers:
            is_conv = isinstance(layer, gnn.MessagePassing)
            h = layer(h, edge_index).tanh() if is_conv else layer(h)
            h, first = (h * 1, h) if first is None else (h + first / 2, first)
        return h + first, first, h.argmax(1)


class Tied(Layers):
    """One layer and one norm that run twice, and a weight of two layers."""

    def __init__(self) -> None:
        super().__init__("tanh", "norm", "gat", "tanh", "norm", "tanh")
        self.layers[3], self.layers[4] = self.layers[0], self.layers[1]
        self.layers[5].lin.weight = self.layers[0].lin.weight


class Edges(nn.Module):
    """Values of edges between layers, an embedding of each node, an argument without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N_SMALL, WIDTH)
        self.layers = nn.ModuleList(EdgeLayer() for _ in range(3))

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, edge_attr = layer(x * scale + self.table.weight, edge_index, edge_attr)
        return x.tanh(), edge_attr.tanh()


class EdgeLayer(gnn.MessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        e = e + self.edge_updater(edge_index, x=x, e=e)
        return x + self.propagate(edge_index, x=x, e=e), e

    def edge_update(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j, e], -1)).tanh()

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return x_j.tanh() * e


N_SMALL, WIDTH = 24, 6
HIDDEN, SCALE = nn.Linear(WIDTH, WIDTH).double(), list[Tensor]()
ROWS = torch.arange(N_SMALL)
ALONE = torch.where(ROWS < 20, ROWS % 3, 3)  # chunk 3 has no neighbour
RAGGED = (ROWS >= 20).long() + (ROWS >= 21)  # chunks of 20, 1 and 3 nodes
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "weights of another layer": (lambda: Layers("gcn", "hidden", "gat", "hidden"), PARTITION),
    "weights of no layer": (lambda: Layers("tanh", "hidden table", "gcn"), PARTITION),
    "computed weights": (lambda: Layers("scaled", "gat", "scaled"), PARTITION),
    "tied": (Tied, PARTITION),
    "edges": (Edges, PARTITION),
    "catching": (lambda: Layers("catching", "gat", "catching"), PARTITION),
    "writing": (lambda: Layers("tanh", "writing", "writing"), PARTITION),
    "norms": (lambda: Layers("norms inside", "norm", "norms inside", "tag"), PARTITION),
    "a chunk alone": (lambda: Layers("tanh", "norm", "gcn", "gat", "tag"), ALONE),
    "ragged": (lambda: Layers("tanh", "norm", "gcn", "gat", "tag"), RAGGED),
}


def inputs_of(name: str) -> tuple[Tensor, ...]:
    """Return features, which need a gradient, edges, and what else the module takes."""
    x, edges = small_graph()
    if name == "a chunk alone":
        edges = edges[:, (edges < 20).all(0)]
    more = (torch.ones(edges.size(1), WIDTH), torch.full((WIDTH,), 0.7)) if name == "edges" else ()
    return tuple(
        one.to(x).requires_grad_() if one.is_floating_point() else one for one in (x, edges, *more)
    )


def trained(name: str, num_calls: int, *, is_plain: bool) -> dict[str, Any]:
    """Return what three steps of the module give: outputs, gradients, buffers and evaluation."""
    torch.manual_seed(0)
    HIDDEN.reset_parameters()
    make, partition = MODULES[name]
    net = make().double()
    engine = one_process_engine(net, partition=partition, exact_in_chunks=True)
    weights = {
        f"weight {n}": p for n, p in [*net.named_parameters(), *HIDDEN.named_parameters("hidden")]
    }
    optimizer, found = torch.optim.SGD(weights.values(), lr=0.001), dict[str, Any]()
    for step in range(3):
        optimizer.zero_grad()
        engine.set_step(step_index=step)
        inputs, outputs, SCALE[:] = inputs_of(name), [], [HIDDEN.bias.exp()]
        for call in range(num_calls):
            args = [one * (1 + call) if one.is_floating_point() else one for one in inputs]
            outputs += net(*args) if is_plain else engine.forward(args, {})
        used = [one.sin().sum() * i for i, one in enumerate(outputs, 1) if one.requires_grad]
        torch.stack(used[:: 1 + step % 2]).sum().backward()
        named = weights | {f"input {i}": one for i, one in enumerate(inputs)}
        grads = {n: p.grad for n, p in named.items() if p.grad is not None}
        found[f"grads {step}"] = {n: grad.clone() for n, grad in grads.items()}
        found[f"outputs {step}"] = [one.detach() for one in outputs]
        found[f"buffers {step}"] = {n: b.clone() for n, b in net.named_buffers()}
        optimizer.step()
    net.eval()
    engine.set_step(caller="evaluation")
    with torch.no_grad():
        inputs = tuple(one.detach() for one in inputs_of(name))
        found["evaluation"] = net(*inputs) if is_plain else engine.forward(inputs, {})
        if not is_plain:
            assert engine.last_step.record.is_exact
            assert engine.last_step.record.num_chunks == int(partition.max()) + 1
            assert not [*engine.graphs.trained.store]  # no rows are kept
    return found


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("name", MODULES)
def test_all_steps_on_one_device_equal_pyg(name: str, num_calls: int) -> None:
    expected = trained(name, num_calls, is_plain=True)
    found = trained(name, num_calls, is_plain=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("double")
def test_a_weight_that_a_layer_does_not_hold_is_refused_on_several_devices() -> None:
    """There ranks could not sum its gradient; held by both layers it is tied."""
    net = Layers("gcn", "hidden", "gat")
    call = flatten_call(net, small_graph(), {})
    cut_module(net, call, classify(call))
    with pytest.raises(UnsupportedError, match=r"(?s)a Tanh that reads .*shape \[6.*self.shared"):
        cut_module(net, call, classify(call), is_shared=True)
    net.layers[1].lin = net.lin
    cut_module(net, call, classify(call), is_shared=True)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("sizes", [(N_SMALL, 3), (3, N_SMALL)])
@pytest.mark.parametrize("partition", [PARTITION, "metis"])
def test_a_graph_that_chunks_do_not_fit_is_evaluated_whole(
    partition: Tensor | str, sizes: tuple[int, ...]
) -> None:
    net, (x, edges) = Layers("tanh", "norm", "gat").eval(), small_graph()
    num_chunks: Any = 4 if partition == "metis" else "auto"
    options = {"partition": partition, "num_chunks": num_chunks, "exact_in_chunks": True}
    engine = one_process_engine(net, **options)
    engine.set_step(caller="evaluation")
    for num_nodes in sizes:
        inputs = x[:num_nodes], edges % num_nodes
        with torch.no_grad():
            torch.testing.assert_close(engine.forward(inputs, {}), net(*inputs))
        plan = next(reversed(engine.graphs._graphs.values())).plan
        assert (plan.num_chunks > 1) == (num_nodes == N_SMALL)

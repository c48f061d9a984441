"""Users' own errors read as in plain Lightning; a refusal names the line and a way that works.

Every error is one screen at most, and has no names of the package's insides.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe.errors import GraphError, UnsupportedError
from tests.helpers.texts import INSIDES
from tests.helpers.trainers import quiet_trainer

N, E, D = 40, 160, 4

Forward = Callable[[Any, Data], Any]
Make = Callable[[], Any]


class Net(nn.Module):
    def __init__(self, *convs: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs or [gnn.GCNConv(D, D) for _ in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


class Module(L.LightningModule):
    def __init__(self, net: nn.Module | None = None, call: Forward | None = None) -> None:
        super().__init__()
        self.net = Net() if net is None else net
        self.call = call or (lambda net, data: net(data.x, data.edge_index))

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.call(self.net, data)
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def graph(**changes: Any) -> Data:
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(N, D, generator=generator),
        edge_index=torch.randint(0, N, (2, E), generator=generator),
        y=torch.randint(0, D, (N,), generator=generator),
        train_mask=torch.arange(N) % 2 == 0,
        edge_type=torch.arange(E) % 3,
    )
    return data.update(changes)


def fit(
    module: L.LightningModule,
    data: Any,
    num_chunks: int = 0,
    *,
    devices: int = 1,
    kind: type[L.Trainer] = L.Trainer,
    **options: Any,
) -> L.Trainer:
    """Train for two steps on a graph or a loader; 0 chunks is plain Lightning."""
    piped = {"num_chunks": num_chunks, "start_method": "popen", **options} if num_chunks else None
    trainer = quiet_trainer(devices, piped, kind, max_epochs=2)
    trainer.fit(module, DataLoader([data], batch_size=None) if isinstance(data, Data) else data)
    return trainer


def error_of(make: Make, data: Data, num_chunks: int = 0) -> Exception:
    torch.manual_seed(0)
    with pytest.raises(Exception) as raised:
        fit(make(), data, num_chunks)
    return raised.value


def check_is_readable(error: Exception, *, in_step: bool = True) -> None:
    """Find words for users, and a line of the user's step if the error was raised in one."""
    frames = traceback.extract_tb(error.__traceback__)
    names = {frame.name for frame in frames if frame.filename == __file__}
    assert bool(names - {"error_of", "fit"}) == in_step, frames
    cause: BaseException | None = error
    while cause is not None:
        assert not INSIDES.search(str(cause)), cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def assert_trains_as_plainly(make: Make, data: Data) -> None:
    modules = []
    for num_chunks in (0, 1):
        torch.manual_seed(0)
        modules.append(make())
        fit(modules[-1], data, num_chunks)
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(one, other)


def of(kind: Make, *names: str) -> Make:
    """Return what makes a module whose net is given these parts of the graph."""
    if not names:
        return lambda: Module(kind())
    return lambda: Module(kind(), lambda net, data: net(*(data[name] for name in names)))


class NoLayer(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(self.lin(x), edge_index)


class TooManyRows(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.cat([x, self.convs[0](x, edge_index)])
        return self.convs[1](x, edge_index) + x[:N]


class Takes(Net):
    def forward(self, data: Data) -> Tensor:
        return super().forward(data.x * data.scale, data.edge_index)


OWN: dict[str, tuple[Make, dict[str, Any]]] = {
    "float labels": (Module, {"y": torch.rand(N)}),
    "labels outside of the classes": (Module, {"y": torch.full((N,), 7)}),
    "features of another width": (Module, {"x": torch.rand(N, D + 1)}),
    "features of integers": (Module, {"x": torch.ones(N, D, dtype=torch.long)}),
    "no features": (Module, {"x": None}),
    "no mask": (Module, {"train_mask": None}),
    "a short mask": (Module, {"train_mask": torch.ones(N - 1, dtype=torch.bool)}),
    "no attribute of the module": (of(NoLayer), {}),
    "no attribute of the graph": (lambda: Module(Takes(), lambda net, data: net(data)), {}),
    "too many rows": (of(TooManyRows), {}),
    "an argument too many": (
        lambda: Module(None, lambda net, data: net(data.x, data.edge_index, size=3)),
        {},
    ),
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", OWN)
def test_the_users_own_error_is_raised_as_it_is(name: str) -> None:
    make, changes = OWN[name]
    plain = error_of(make, graph(**changes))
    for num_chunks in (1, 4):
        found = error_of(make, graph(**changes), num_chunks)
        assert type(found) is type(plain) and str(found) == str(plain)
        assert found.__cause__ is None
        check_is_readable(found)


def test_a_malformed_graph_reads_better_than_plainly() -> None:
    edges, text = torch.randint(1, N + 1, (2, E)).fill_diagonal_(N), f"from 0 to {N - 1}.*node {N}"
    error = error_of(Module, graph(edge_index=edges), 4)
    assert isinstance(error, GraphError) and re.search(f"(?s){text}", str(error)), error
    check_is_readable(error)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    "changes",
    [
        {"edge_index": torch.zeros(2, 0, dtype=torch.long)},
        {"edge_index": torch.arange(2 * N).view(2, N).remainder(N).repeat(1, 3)},
        {"edge_index": torch.randint(0, N, (2, E), dtype=torch.int32)},
    ],
    ids=["no edges", "duplicate edges", "int32 edges"],
)
def test_an_unusual_graph_trains_as_plainly(changes: dict[str, Any]) -> None:
    assert_trains_as_plainly(Module, graph(**changes))
    fit(Module(), graph(**changes), 4)


class WritesRows(Net):
    def forward(self, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
        x[mask] = 0.0
        return super().forward(x, edge_index)


class SelectsRows(Net):
    def forward(self, x: Tensor, edge_index: Tensor, mask: Tensor) -> Tensor:
        return super().forward(torch.where(mask.unsqueeze(-1), 0.0, x), edge_index)


class Branches(Module):
    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.left, self.right = Net(), Net()

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.left(data.x, data.edge_index) + self.right(data.x, data.edge_index)
        return F.cross_entropy(out, data.y)


class OwnRows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.convs[1] = AddsRows(D, D)


class AddsRows(gnn.SAGEConv):
    """Has a row of weights for each node."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rows = nn.Parameter(torch.zeros(N, D))

    def forward(self, x: Tensor, edge_index: Tensor, size: Any = None) -> Tensor:
        return super().forward(x + self.rows, edge_index, size)


class WithoutFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.FastRGCNConv(N, D, 3), gnn.FastRGCNConv(D, D, 3)

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        h = self.first(None, edge_index, edge_type).relu()
        return self.second(h, edge_index, edge_type)


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


straight: Any = Straight.apply  # as is usual


class Rounds(Net):
    def between(self, x: Tensor) -> Any:
        return straight(x)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.between(self.convs[0](x, edge_index)), edge_index)


class RoundsInPart(Rounds):
    class Apply(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Straight.apply(x)

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Apply()

    def between(self, x: Tensor) -> Any:
        return self.part(x)


MASKED = ("x", "edge_index", "train_mask")
# What is refused, in which words, and what the remedy makes of it, with what options.
REFUSED: dict[str, tuple[Any, ...]] = {
    "rows written": (
        of(WritesRows, *MASKED),
        r"assignment to a part of a tensor at .*`x\[mask\] = 0.0`.*torch.where",
        of(SelectsRows, *MASKED),
    ),
    "two branches": (
        Branches,
        "'left' and 'right'.*pipelined_module=",
        Branches,
        {"pipelined_module": "left"},
    ),
    "weights of nodes in a layer": (
        of(OwnRows),
        rf"'convs.1.rows' has one row for each of the {N} nodes. Read it in forward",
        of(OwnRows),
        {"num_chunks": 1},
    ),
    "a layer without features": (
        of(WithoutFeatures, "edge_index", "edge_type"),
        r"An RGCNConv has no features \(None\) at .*torch.arange",
    ),
    "an own autograd function": (
        of(Rounds),
        "forward calls the autograd function Straight, .*submodule without message passing",
        of(RoundsInPart),
    ),
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_line_and_a_remedy_that_works(name: str) -> None:
    make, text, *mended = REFUSED[name]
    error = error_of(make, graph(), 4)
    assert isinstance(error, UnsupportedError) and re.search(f"(?s){text}", str(error)), error
    check_is_readable(error, in_step=make is not Branches)
    if mended:
        module = mended[0]()
        fit(module, graph(), **{"num_chunks": 4, **dict(*mended[1:])})

"""Attributes that a forward reads: a change is seen in the next step; it leaves none behind."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages.attributes import Guard
from tests.helpers.alike import Fits, graph
from tests.helpers.engines import one_process_engine
from tests.helpers.trainers import quiet_trainer

N, D = 26, 4


class Kind(Enum):
    ONE, THREE = 1.0, 3.0


@dataclass
class Config:
    tau: float = 1.0


class Part(nn.Module):
    """Traced through, since it holds a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = gnn.SAGEConv(D, D), nn.LayerNorm(D), nn.Dropout(0.0)
        self.p = 0.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.drop(self.norm(self.conv(x, edge_index)))
        return F.dropout(h, self.p, self.training) + (0.0 if self.training else 1.0)


class Net(nn.Module):
    """Runs `how` between its two parts.

    Args:
        how: Given the module and what the first part has computed.
    """

    __slots__ = ("_slot",)

    def __init__(self, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.how = [how]  # bound to nothing
        self._scale, self._slot = 1.0, 1.0
        self.hparams, self._list, self._cache = AttributeDict(scale=1.0), [1.0, 2.0], {}
        self._mixed, self.args = {"scale": 1.0, "of": torch.ones(1)}, Namespace(scale=1.0)
        self.number = torch.ones(())  # no buffer
        self.betas, self.kind, self.config = np.linspace(1, 2, 3), Kind.ONE, Config()
        self.rng, self.call = np.random.default_rng(0), partial(torch.add, alpha=1.0)
        self._options, self.function, self._it = {"shifts": [0.0, 1.0]}, torch.relu, None
        self.weight = nn.Parameter(torch.ones(D))
        self.register_buffer("mask", torch.ones(D))
        self.extra: Any = nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.parts[0](x, edge_index)
        h = self.how[0](self, h)
        return self.parts[1](h, edge_index)


def make(how: Callable[[Any, Tensor], Any]) -> tuple[Net, PipelineEngine, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = Net(how).double()
    engine = one_process_engine(net, partition=torch.arange(N) % 3)
    engine.controls.is_exact = True
    return net, engine, (torch.randn(N, D, dtype=torch.float64), torch.randint(0, N, (2, 60)))


def set_to(path: str, value: Any = 3.0) -> Callable[[Any], None]:
    """Return what sets an attribute, or an item, of the module."""
    *owners, last = path.split(".")

    def change(net: Any) -> None:
        for name in owners:
            net = net[int(name)] if name.isdigit() else getattr(net, name)
        if isinstance(net, list | dict) or last.isdigit():
            net[int(last) if last.isdigit() else last] = value
        else:
            setattr(net, last, value)

    return change


def in_place(name: str) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        with torch.no_grad():
            getattr(net, name).mul_(3.0)

    return change


def add_layer(net: Any) -> None:
    torch.manual_seed(1)
    net.extra = nn.Linear(D, D).double()


def add_part(net: Any) -> None:
    if len(net.parts) == 2:
        net.parts.insert(1, Part().double())


def as_it_is(net: Any, h: Tensor) -> Tensor:
    return h


THREES = torch.full((D,), 3.0, dtype=torch.float64)
# What runs in between, and what changes: a name is set to 3.
CASES: dict[str, tuple[Callable[[Any, Tensor], Any], str | Callable[[Any], Any]]] = {
    "private": (lambda net, h: h * net._scale, "_scale"),
    "of NumPy": (lambda net, h: net._scale * h, set_to("_scale", np.float64(3.0))),
    "branch": (lambda net, h: h * 2 if net._scale > 2 else h, "_scale"),
    "int and float": (lambda net, h: h * (2 + (type(net._scale) is int)), set_to("_scale", 1)),
    "appears": (lambda net, h: h * getattr(net, "later", 1.0), "later"),
    "nested": (
        lambda net, h: h + net._options["shifts"][1],
        lambda net: net._options["shifts"].__setitem__(1, 3.0),
    ),
    "hparams": (lambda net, h: h * net.hparams.scale, "hparams.scale"),
    "beside a tensor": (lambda net, h: h * net._mixed["scale"], "_mixed.scale"),
    "namespace": (lambda net, h: h * net.args.scale, "args.scale"),
    "tensor as a number": (lambda net, h: h * net.number.item(), in_place("number")),
    "list": (lambda net, h: h * net._list[1], "_list.1"),
    "array": (lambda net, h: h * net.betas[1], lambda net: net.betas.__imul__(0.9)),
    "enum": (lambda net, h: h * net.kind.value, set_to("kind", Kind.THREE)),
    "dataclass": (lambda net, h: h * net.config.tau, "config.tau"),
    "partial": (
        lambda net, h: net.call(h, 1.0),
        set_to("call", partial(torch.add, alpha=3.0)),
    ),
    "length": (lambda net, h: h * len(net._list), lambda net: net._list.append(1.0)),
    "function": (lambda net, h: net.function(h), set_to("function", torch.tanh)),
    "part's mode": (as_it_is, lambda net: net.parts[0].eval()),
    "dropout": (as_it_is, set_to("parts.0.drop.p", 1.0)),
    "functional dropout": (as_it_is, set_to("parts.0.p", 1.0)),
    "option of a layer": (as_it_is, set_to("parts.1.conv.normalize", True)),
    "option read of a layer": (lambda net, h: h * net.parts[0].norm.eps, "parts.0.norm.eps"),
    "buffer in place": (lambda net, h: h * net.mask, in_place("mask")),
    "buffer": (lambda net, h: h * net.mask, set_to("mask", THREES.clone())),
    "weight": (lambda net, h: h * net.weight, set_to("weight", nn.Parameter(THREES.clone()))),
    "other layer": (as_it_is, set_to("parts.0.conv", gnn.SAGEConv(D, D).double())),
    "other convolution": (as_it_is, set_to("parts.0.conv", gnn.GCNConv(D, D).double())),
    "other part": (as_it_is, set_to("parts.1", Part().double())),
    "other norm": (as_it_is, set_to("parts.0.norm", nn.Identity())),
    "layer more": (lambda net, h: net.extra(h), add_layer),
    "part more": (as_it_is, add_part),
    "frozen": (as_it_is, lambda net: net.parts[0].requires_grad_(False)),
}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_what_has_changed_is_read_in_the_next_step(name: str) -> None:
    how, change = CASES[name]
    change = set_to(change) if isinstance(change, str) else change
    net, engine, inputs = make(how)
    for is_changed in (False, True, False):
        if is_changed:
            change(net)
        outputs, grads = [], []
        for run in (lambda: net(*inputs), lambda: engine.forward(inputs, {})):
            net.zero_grad(set_to_none=True)
            outputs.append(run())
            outputs[-1].square().sum().backward()
            grads.append({n: p.grad for n, p in net.named_parameters() if p.grad is not None})
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*grads)
        with torch.no_grad():
            torch.testing.assert_close(engine.forward(inputs, {}), net(*inputs))


def test_ranks_describe_equal_attributes_alike() -> None:
    """Sets of texts have another order in each process; members of an enum differ by name."""
    net, _, _ = make(as_it_is)
    net.names = {"one", "two", "three"}
    before = Guard(net).state().text
    assert "'one'\", \"'three'\", \"'two'" in before
    net.kind = Kind.THREE
    assert Guard(net).state().text != before


def widen(net: Any) -> None:
    torch.manual_seed(1)
    net.parts[0].conv, net.parts[0].norm = gnn.SAGEConv(D, 7), nn.LayerNorm(7)
    net.parts[1].conv = gnn.SAGEConv(7, D)
    net.double()


def test_layers_of_another_width_read_no_rows_of_those_before() -> None:
    net, engine, inputs = make(as_it_is)
    engine.controls.is_exact = False
    for number in range(6):
        if number == 3:
            widen(net)
        engine.set_step(step_index=number)
        found = engine.forward(inputs, {})
        torch.testing.assert_close(found, net(*inputs))
        found.sum().backward()


def test_the_grad_mode_is_read() -> None:
    net, _, inputs = make(lambda net, h: h * 2 if torch.is_grad_enabled() else h)
    engine = one_process_engine(net, partition=torch.zeros(N, dtype=torch.int64))
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            torch.testing.assert_close(engine.forward(inputs, {}), net(*inputs))


def without_gradients(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        return h * 2


STORES = "values kept on the module: "
CHANCE = "to compute the same in every call.*random numbers"
ROWS = "Forward uses a number of nodes or edges as a Python number"
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "private": (lambda net, h: setattr(net, "_h", h) or h, STORES + "_h"),
    "slot": (lambda net, h: setattr(net, "_slot", h) or h, STORES + "_slot"),
    "list": (lambda net, h: net._list.append(h) or h, STORES + "_list"),
    "dict": (lambda net, h: net._cache.setdefault("h", h), STORES + "_cache"),
    "layer": (lambda net, h: setattr(net.parts[0].conv, "h", h) or h, STORES + "h"),
    "count": (
        lambda net, h: setattr(net, "_count", getattr(net, "_count", 0) + 1) or h,
        STORES + "_count",
    ),
    "list of counts": (lambda net, h: net._list.append(1.0) or h, STORES + "_list"),
    "no_grad": (without_gradients, "one mode of autograd"),
    "random": (lambda net, h: h * (random.random() > 2), CHANCE),
    "numpy": (lambda net, h: h * bool(np.random.rand() > 2), CHANCE),
    "torch": (lambda net, h: h * (torch.rand(1).item() > 2), CHANCE),
    "own generator": (lambda net, h: h * bool(net.rng.random() > 2), CHANCE),
    "a decision on rows": (lambda net, h: h * 2 if h.size(0) > 10 else h, ROWS),
    "rows of a new tensor": (
        lambda net, h: h + torch.zeros(h.size(0), 1),
        ROWS + r".*at test_attr.*torch.zeros(.|\n)*x.new_zeros\(x.size\(0\), 8\)",
    ),
    "a loop over rows": (lambda net, h: h * sum(range(h.size(0))), ROWS),
    "length": (lambda net, h: h * (len(h) > 10), "len.. of a tensor at.*Write x.size.0."),
}


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_forward_leaves_behind_is_refused(name: str) -> None:
    how, text = REFUSED[name]
    net, engine, inputs = make(how)
    before = dict(vars(net)), net._slot, list(net._list), dict(net._cache)
    with pytest.raises(UnsupportedError, match=text):
        engine.forward(inputs, {})
    if name != "layer":
        assert (dict(vars(net)), net._slot, net._list, net._cache) == before


def test_what_a_forward_computes_once_is_kept() -> None:
    def once(net: Any, h: Tensor) -> Tensor:
        if net._it is None:
            net._it = len(net._list)
        return h * net._it

    net, engine, inputs = make(once)
    torch.testing.assert_close(engine.forward(inputs, {}), net(*inputs))
    assert net._it == 2


class Gate(nn.Module):
    """Once it is open, it mixes nodes."""

    def __init__(self) -> None:
        super().__init__()
        self._is_open = False

    def forward(self, h: Tensor) -> Tensor:
        return h - h.mean(0) if self._is_open else h


def test_a_part_whose_option_has_changed_is_checked_again() -> None:
    net, engine, inputs = make(lambda net, h: net.extra(h))
    net.extra = Gate()
    engine.forward(inputs, {})
    net.extra._is_open = True
    with pytest.raises(UnsupportedError, match="sees other nodes only in messages"):
        engine.forward(inputs, {})


def test_attributes_that_change_nothing_cost_no_new_layers() -> None:
    net, engine, inputs = make(as_it_is)
    for net.best_accuracy in (0.5, 0.6, 0.7):
        torch.testing.assert_close(engine.forward(inputs, {}), net(*inputs))
    assert len({id(mode.layers) for mode in engine.model._modes.values()}) == 2  # of each mode


class Itself(Fits):
    """Is the pipelined module itself; its forward runs `how`."""

    def __init__(self, how: Callable[[Any], Any]) -> None:
        super().__init__(nn.Identity(), lambda net, data: self(data.x, data.edge_index))
        self.conv, self.how = gnn.SAGEConv(5, 5), [how]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.how[0](self)
        return self.conv(x, edge_index)


@pytest.mark.parametrize(
    ("how", "found"),
    [
        (lambda module: module.current_epoch, "self.current_epoch"),
        (lambda module: module.log("loss", 1.0), "self.log"),
        (lambda module: module.trainer.max_epochs, "self.max_epochs"),
        (lambda module: module.global_rank, None),
    ],
)
def test_progress_of_training_is_refused_in_forward(how: Any, found: str | None) -> None:
    module = Itself(how).double()
    loader = DataLoader([graph()], batch_size=None)
    refused = pytest.raises(UnsupportedError, match=found) if found else nullcontext()
    trainer = quiet_trainer(1, {"num_chunks": 1}, max_epochs=2, num_sanity_val_steps=0)
    with refused:
        trainer.fit(module, loader)
    assert found or module.trainer is trainer


class Counts(gnn.SAGEConv):
    """A layer that counts its own calls."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.calls, self._last = 0, 0.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        self.calls += 1
        self._last = float(self.calls)
        return super().forward(x, edge_index)


def test_a_layer_that_counts_its_calls_leaves_steps_pipelined() -> None:
    net, engine, inputs = make(as_it_is)
    net.parts[1].conv = Counts().double()

    def is_exact() -> bool:
        engine.forward(inputs, {}).sum().backward()
        record = engine.last_step.record
        assert record is not None
        return record.is_exact

    engine.controls.is_exact = False
    assert [is_exact() for _ in range(4)] == [True, False, False, False]
    net.parts[1].conv.other = 2.0  # an attribute that the layer does not set
    assert is_exact()
    assert not is_exact()

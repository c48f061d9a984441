"""P12: where no step of training or evaluation calls it, the module is the user's own.

Each habit runs on the net, and on a copy, which nothing pipelines, with equal random numbers.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule
from tests.helpers.cases import covering
from tests.helpers.realistic import realistic_graph
from tests.helpers.trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("double")


class Net(nn.Module):
    """Three layers with norms and dropout; draws more random numbers where `noise` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.GCNConv(5, 8), gnn.GCNConv(8, 8), gnn.GCNConv(8, 3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
        self.drop, self.noise = nn.Dropout(0.4), ""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = self.drop(norm(conv(x, edge_index)).relu())
            if self.noise == "dropout":
                x = F.dropout(x, 0.3, training=True)
        if self.noise == "randn":
            x = x + 0.1 * torch.randn_like(x)
        return self.convs[2](x, edge_index)


Habit = Callable[[Net, Data], list[Tensor]]


def plain(net: Net, data: Data) -> list[Tensor]:
    with torch.no_grad():
        return [net(data.x, data.edge_index), net(data.x * 2, data.edge_index)]


def of_a_part(net: Net, data: Data) -> list[Tensor]:
    with torch.no_grad():
        return [net(data.x[:9], data.edge_index[:, (data.edge_index < 9).all(0)])]


def monte_carlo(net: Net, data: Data) -> list[Tensor]:
    was = [one.training for one in net.modules()]
    net.drop.train()
    with torch.no_grad():
        found = [net(data.x, data.edge_index) for _ in range(3)]
    for one, training in zip(net.modules(), was, strict=True):
        one.training = training
    return drawn(found)


def noisy(kind: str) -> Habit:
    def run(net: Net, data: Data) -> list[Tensor]:
        net.noise = kind
        with torch.no_grad():
            found = [net(data.x, data.edge_index) for _ in range(3)]
        net.noise = ""
        return drawn(found)

    return run


def drawn(found: list[Tensor]) -> list[Tensor]:
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
    return found


def of_inputs(net: Net, data: Data) -> list[Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        x = data.x.clone().requires_grad_()
        out = net(x, data.edge_index.clone())
        [grad] = torch.autograd.grad(out[:, 0].sum(), [x], create_graph=True)
        return [out.detach(), grad.detach()]


def attack(net: Net, data: Data) -> list[Tensor]:
    """As in adversarial evaluation; `net.head` is outside of what is pipelined."""
    before = [p.grad for p in net.parameters()]
    net.zero_grad()
    with torch.inference_mode(False), torch.enable_grad():
        delta = torch.zeros_like(data.x, requires_grad=True)
        out = net(data.x.clone() + delta, data.edge_index.clone())
        (F.cross_entropy(out, data.y.clone()) - (delta + 1e-3).square().sum()).backward()
        assert delta.grad is not None
        found = [out.detach(), delta.grad, *(p.grad for p in net.parameters())]
    for p, grad in zip(net.parameters(), before, strict=True):
        p.grad = grad
    return [one.clone() for one in found if one is not None]


def traced(net: Net, data: Data) -> list[Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        args = data.x.clone(), data.edge_index.clone()
        was = [one.training for one in net.modules()]
        found = torch.jit.trace(net.eval(), args, check_trace=False)(*args)
    for one, training in zip(net.modules(), was, strict=True):
        one.training = training
    return [found]


def averaged(net: Net, data: Data) -> list[Tensor]:
    """Evaluate with other weights in place of the module's."""
    others = {name: 0.5 * p.detach() for name, p in net.named_parameters()}
    return [functional_call(net, others, (data.x, data.edge_index))]


def copied(how: Callable[[nn.Module], Any]) -> Habit:
    """A copy computes the same, with gradients as well, and has weights of its own."""

    def run(net: Net, data: Data) -> list[Tensor]:
        with torch.inference_mode(False):
            made = how(net)
        assert type(getattr(made, "module", made)) is Net
        found = [*plain(made, data), *of_inputs(made, data)]
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
        assert not plain(made, data)[0].any()
        return [*found, *plain(net, data)]

    return run


HABITS: dict[str, Habit] = {
    "plain": plain,
    "a part of the graph": of_a_part,
    "Monte Carlo dropout": monte_carlo,
    "dropout in evaluation": noisy("dropout"),
    "noise in evaluation": noisy("randn"),
    "gradients of inputs": of_inputs,
    "an attack": attack,
    "traced": traced,
    "averaged": averaged,
    "copied twice": copied(lambda net: copy.deepcopy(copy.deepcopy(net))),
    "pickled": copied(lambda net: pickle.loads(pickle.dumps(net))),
    "an averaged model": copied(lambda net: AveragedModel(net, use_buffers=True)),
}


class Module(L.LightningModule):
    """Does one thing at one place, on the first rank alone if the place is a hook."""

    def __init__(self, place: str, habit: Habit) -> None:
        super().__init__()
        self.net, self.place, self.habit = Net(), place, habit
        self.num_checks = 0

    def reach(self, place: str) -> None:
        if place != self.place or (place.startswith("on_") and self.global_rank):
            return
        with torch.inference_mode(False):
            data, alike = realistic_graph(), copy.deepcopy(self.net)
        state = torch.get_rng_state()
        expected = self.habit(alike, data)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        found = self.habit(self.net, data)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(self.net.state_dict(), alike.state_dict())
        assert torch.equal(torch.get_rng_state(), after)
        self.num_checks += 1

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        self.reach("before the call")
        loss = F.cross_entropy(self.net(data.x, data.edge_index), data.y)
        self.reach("behind the call")
        return loss

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.net(data.x, data.edge_index)
        self.reach("validation_step")

    def test_step(self, data: Data, batch_idx: int) -> None:
        self.reach("test_step")

    def predict_step(self, data: Data, batch_idx: int) -> None:
        self.reach("predict_step")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_test_start",
    "on_test_epoch_end",
    "on_predict_end",
    "on_fit_end",
)
STEPS = ("validation_step", "test_step", "predict_step")
for name in HOOKS:
    setattr(Module, name, lambda self, *_, name=name: self.reach(name))


def run(place: str, habit: str, layout: tuple[int, ...]) -> None:
    """Train, test or predict with so many stages, chunks and shards."""
    num_stages, num_chunks, num_shards = (*layout, 1)[:3]
    torch.manual_seed(0)
    module, data = Module(place, HABITS[habit]), FullGraphDataModule(realistic_graph())
    piped = {"num_chunks": num_chunks, "graph_parallel": num_shards}
    options: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 1}
    trainer = quiet_trainer(num_stages * num_shards, piped, **options)
    if "test" in place:
        trainer.test(module, data, verbose=False)
    elif "predict" in place:
        trainer.predict(module, data)
    else:
        trainer.fit(module, data)
    assert module.num_checks or num_stages * num_shards > 1  # a forked rank counts for itself
    twin = copy.deepcopy(module.eval().net)
    torch.testing.assert_close(plain(module.net, data.data), plain(twin, data.data))


DEVICES = [(1, 1), (1, 6), (2, 1), (2, 6), (1, 4, 2)]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize(("place", "habit", "layout"), covering(STEPS, HABITS, DEVICES, times=4))
def test_p12_in_steps_of_evaluation(place: str, habit: str, layout: tuple[int, ...]) -> None:
    """With gradients, in part in train mode, or with random numbers: the user's own numbers."""
    run(place, habit, layout)


@pytest.mark.some_cases(3)
@pytest.mark.parametrize(("place", "habit", "layout"), covering(HOOKS, HABITS, DEVICES, times=4))
def test_p12_in_hooks(place: str, habit: str, layout: tuple[int, ...]) -> None:
    """On the first rank alone."""
    run(place, habit, layout)


class DrawsAlone(Module):
    """Draws on the first rank alone between steps, and on all of them within."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        data = copy.copy(data)
        data.edge_index = data.edge_index[:, torch.rand(data.num_edges) < 0.8]
        loss = super().training_step(data, batch_idx)
        return loss * (1 + torch.rand(()))


def test_p12_all_ranks_go_on_with_the_random_numbers_of_the_first() -> None:
    module = DrawsAlone("on_train_batch_end", monte_carlo)
    trainer = quiet_trainer(2, {"num_chunks": 1}, max_epochs=3)
    trainer.fit(module, FullGraphDataModule(realistic_graph()))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("place", ["before the call", "behind the call"])
@pytest.mark.parametrize("habit", ["plain", "Monte Carlo dropout", "dropout in evaluation"])
def test_p12_without_gradients_in_training_step(place: str, habit: str) -> None:
    run(place, habit, (2, 6))

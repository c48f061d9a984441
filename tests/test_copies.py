"""Copies of the pipelined module, and what has its weights as well: as in plain Lightning."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, weight_norm
from torch.optim.swa_utils import AveragedModel
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule
from tests.helpers.realistic import realistic_graph
from tests.helpers.trainers import double_precision, make_trainer, weights


@pytest.fixture(autouse=True)
def double() -> Any:
    with double_precision():
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.SAGEConv(5, 8), gnn.SAGEConv(8, 8), gnn.SAGEConv(8, 3)])
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x * self.scale


class Module(L.LightningModule):
    """Trains a net, and writes down what it is told to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.seen: list[Tensor] = []

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(data.x, data.edge_index), data.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def zeroed(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    return net


def saved_and_loaded(net: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deep": copy.deepcopy,
    "deep, twice": lambda net: copy.deepcopy(copy.deepcopy(net)),
    "pickled": lambda net: pickle.loads(pickle.dumps(net)),
    "saved": saved_and_loaded,
    "averaged": lambda net: AveragedModel(net, use_buffers=True),
    "with its owner": lambda net: copy.deepcopy(nn.ModuleDict({"net": net}))["net"],
}


class Copies(Module):
    """Copies the net after the first step, and looks at the copy's outputs, then zeroed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_end(self, outputs: Any, data: Data, batch_idx: int) -> None:
        made = COPIES[self.how](self.net)
        assert type(getattr(made, "module", made)) is Net
        with torch.no_grad():
            self.seen += [made(data.x, data.edge_index), self.net(data.x, data.edge_index)]
            self.seen += [zeroed(made)(data.x, data.edge_index)]
        loss = made(data.x, data.edge_index).square().sum()
        assert len(torch.autograd.grad(loss, list(made.parameters()), allow_unused=True)) == 10


def run(module: Module, num_stages: int, *callbacks: L.Callback, epochs: int = 3) -> Module:
    trainer = make_trainer(num_stages, epochs, *callbacks)
    trainer.fit(module, datamodule=FullGraphDataModule(realistic_graph()))
    return module


def seeded(kind: Callable[..., Any], *args: Any) -> Any:
    L.seed_everything(1, verbose=False)
    return kind(*args)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_a_life_of_its_own(how: str) -> None:
    plain, ours = run(seeded(Copies, how), 0), run(seeded(Copies, how), 1)
    torch.testing.assert_close(ours.seen, plain.seen)
    assert all(not out.any() for out in ours.seen[2::3])
    torch.testing.assert_close(weights(ours.net), weights(plain.net))


def test_a_copy_trains() -> None:
    class Keeps(Module):
        def on_train_end(self) -> None:
            self.made = [copy.deepcopy(self.net)]

    def fit_twice(num_stages: int) -> Module:
        again = seeded(Module)
        again.net = run(seeded(Keeps), num_stages).made[0]
        return run(again, num_stages)

    torch.testing.assert_close(weights(fit_twice(1).net), weights(fit_twice(0).net))


class Copying(Module):
    def on_train_epoch_end(self) -> None:
        COPIES["deep"](self.net)


def test_a_copy_on_stages_is_refused() -> None:
    with pytest.raises(Exception, match=r"weights of its own stage.*Copy it before training"):
        run(seeded(Copying), 2)


class Taught(Module):
    """Learns from a teacher: a copy, a moving average or fixed."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.teacher, self.moves = copy.deepcopy(self.net).requires_grad_(False), moves

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index)
        with torch.no_grad():
            target = self.teacher(data.x, data.edge_index)
        return F.cross_entropy(out, data.y) + F.mse_loss(out, target + 1)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.moves:
            for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(theirs.detach(), 0.5)


@pytest.mark.parametrize(("moves", "num_stages"), [(True, 1), (False, 1), (False, 2)])
def test_a_teacher_runs_beside_the_pipeline(moves: bool, num_stages: int) -> None:
    plain, ours = run(seeded(Taught, moves), 0), run(seeded(Taught, moves), num_stages)
    torch.testing.assert_close(weights(ours), weights(plain))


class Aliased(Module):
    """Its layers have a second name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        convs = self.net.convs
        if how == "list":
            self.backbone = convs
        else:
            kind = nn.ModuleList if how == "other list" else nn.Sequential
            self.backbone = kind(*convs[:2]) if how == "part" else kind(list(convs))


def unfreezing() -> L.Callback:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("how", ["list", "other list", "part"])
def test_an_alias_of_the_layers_changes_nothing(how: str, num_stages: int) -> None:
    plain = run(seeded(Aliased, how), 0, unfreezing())
    ours = run(seeded(Aliased, how), num_stages, unfreezing())
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


class Tied(Module):
    """Decodes by a weight of the net, read where it is or shared by a layer."""

    def __init__(self, is_layer: bool) -> None:
        super().__init__()
        self.decode = nn.Linear(3, 8, bias=False)
        self.is_layer = is_layer
        if is_layer:
            self.decode.weight = nn.Parameter(torch.randn(8, 3))
            self.net.scale = nn.Parameter(torch.ones(8))
            self.net.convs[2].lin_l.weight = nn.Parameter(torch.randn(8, 8))
            self.net.convs[2] = gnn.SAGEConv(8, 8)
            self.decode = nn.Linear(8, 8, bias=False)
            self.decode.weight = self.net.convs[1].lin_l.weight

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index)
        back = self.decode(out) if self.is_layer else out @ self.net.convs[2].lin_l.weight
        return F.cross_entropy(out, data.y) + back.square().mean()


@pytest.mark.parametrize("is_layer", [True, False])
@pytest.mark.parametrize(("num_stages", "num_shards"), [(1, 1), (1, 2)])
def test_weights_may_be_read_outside(is_layer: bool, num_stages: int, num_shards: int) -> None:
    modules = []
    for stages, shards in ((0, 1), (num_stages, num_shards)):
        modules.append(seeded(Tied, is_layer))
        trainer = make_trainer(stages, 3, num_shards=shards)
        trainer.fit(modules[-1], datamodule=FullGraphDataModule(realistic_graph()))
    torch.testing.assert_close(weights(modules[1]), weights(modules[0]))


class Normed(Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        for conv in self.net.convs:
            if how == "new":
                parametrizations.weight_norm(conv.lin_l)
            elif how == "old":
                weight_norm(conv.lin_r)
            else:
                parametrizations.orthogonal(conv.lin_l)
        if how == "new":
            parametrizations.weight_norm(self.net, "scale")


@pytest.mark.parametrize(
    ("how", "num_stages"), [("new", 1), ("new", 2), ("old", 1), ("orthogonal", 2)]
)
def test_parametrized_weights_train(how: str, num_stages: int) -> None:
    plain, ours = run(seeded(Normed, how), 0), run(seeded(Normed, how), num_stages)
    torch.testing.assert_close(weights(ours.net), weights(plain.net))


class Swapped(Module):
    """Evaluates the net with other weights by functional_call: an average, or the first ones."""

    def __init__(self, moves: bool = True) -> None:
        super().__init__()
        self.moves = moves

    def on_fit_start(self) -> None:
        self.average = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def on_train_batch_end(self, outputs: Any, data: Data, batch_idx: int) -> None:
        with torch.no_grad():
            for name, p in self.net.named_parameters() if self.moves else ():
                self.average[name].lerp_(p, 0.5)
            args = (data.x, data.edge_index)
            self.seen.append(functional_call(self.net, self.average, args))


def test_other_weights_by_functional_call() -> None:
    plain, ours = run(seeded(Swapped), 0), run(seeded(Swapped), 1)
    torch.testing.assert_close(ours.seen, plain.seen)
    torch.testing.assert_close(weights(ours.net), weights(plain.net))


def test_other_weights_are_refused_on_stages() -> None:
    with pytest.raises(Exception, match=r"a new tensor as .*cannot give them other weights"):
        run(seeded(Swapped, False), 2)


class Fast(Module):
    """Takes a step of its own before the loss."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        fast = {name: p * 0.9 for name, p in self.net.named_parameters()}
        out = functional_call(self.net, fast, (data.x, data.edge_index))
        return F.cross_entropy(out, data.y)


def test_computed_weights_are_refused() -> None:
    with pytest.raises(Exception, match="a computed tensor as 'scale', for example"):
        run(seeded(Fast), 1)


class Reloads(Module):
    """Goes back to the first weights, by hand."""

    def on_fit_start(self) -> None:
        self.first = copy.deepcopy(self.net.state_dict())

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.net.load_state_dict(self.first)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_weights_loaded_by_hand(num_stages: int) -> None:
    plain, ours = run(seeded(Reloads), 0), run(seeded(Reloads), num_stages)
    torch.testing.assert_close(weights(ours.net), weights(plain.net))


class Cast(Module):
    """Computes in another precision from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.float()

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x.to(self.net.scale.dtype), data.edge_index)
        return F.cross_entropy(out, data.y)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_another_precision(num_stages: int) -> None:
    plain, ours = run(seeded(Cast), 0), run(seeded(Cast), num_stages)
    torch.testing.assert_close(weights(ours.net).float(), weights(plain.net))

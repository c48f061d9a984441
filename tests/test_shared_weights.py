"""Weights of the pipelined module that something else has, sets or reads: as in plain Lightning."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, weight_norm
from torch_geometric.data import Data

from lightning_gnnpipe.errors import UnsupportedError
from tests.helpers.cases import slow
from tests.helpers.trainers import assert_same, weights
from tests.test_strategy import Make, fit

pytestmark = pytest.mark.usefixtures("double")


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
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(data.x, data.edge_index), data.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


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


class Tied(Module):
    """Decodes by a weight of the net, read where it is or shared by a layer."""

    def __init__(self, is_layer: bool) -> None:
        super().__init__()
        self.is_layer = is_layer
        if is_layer:
            self.net.scale, self.net.convs[2] = nn.Parameter(torch.ones(8)), gnn.SAGEConv(8, 8)
            self.decode = nn.Linear(8, 8, bias=False)
            self.decode.weight = self.net.convs[1].lin_l.weight

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index)
        back = self.decode(out) if self.is_layer else out @ self.net.convs[2].lin_l.weight
        return F.cross_entropy(out, data.y) + back.square().mean()


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


class Fast(Module):
    """Takes a step of its own before the loss."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        fast = {name: p * 0.9 for name, p in self.net.named_parameters()}
        out = functional_call(self.net, fast, (data.x, data.edge_index))
        return F.cross_entropy(out, data.y)


class Resting(Module):
    """A layer has no gradient in the second epoch: with one of zeros its weights would decay."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.edge_index)
        return F.cross_entropy(out if self.current_epoch == 1 else self.head(out), data.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, weight_decay=0.1)


class Penalized(Module):
    """Decays its weights by hand, before and after the call of the net."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        before = torch.stack([p.square().sum() for p in self.net.parameters()]).sum()
        loss = super().training_step(data, batch_idx)
        return loss + 0.01 * (before + sum(p.abs().sum() for p in self.parameters()))


AS_PLAIN: list[Any] = [  # with so many stages and shards
    (Resting, 2, 1),
    (Penalized, 2, 1),
    (Penalized, 1, 2),
    (partial(Taught, True), 1, 1),
    (partial(Taught, False), 2, 1),
    (partial(Tied, False), 2, 1),
    (partial(Tied, True), 2, 1),
    (partial(Tied, True), 1, 2),
    slow(partial(Normed, "new"), 2, 1),
    (partial(Normed, "orthogonal"), 2, 1),
    (partial(Normed, "old"), 1, 1),
]


@pytest.mark.some_cases(5)
@pytest.mark.parametrize(("make", "num_stages", "num_shards"), AS_PLAIN)
def test_what_shares_or_changes_weights_trains_as_plainly(
    make: Make, num_stages: int, num_shards: int
) -> None:
    plain, ours = fit(0, make), fit(num_stages, make, num_shards=num_shards)
    assert_same(ours[0], plain[0])


class Cast(Module):
    """Computes in another precision from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.float()

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x.to(self.net.scale.dtype), data.edge_index)
        return F.cross_entropy(out, data.y)


def test_another_precision_from_an_epoch_on() -> None:
    plain, ours = (weights(fit(number, Cast)[0]) for number in (0, 2))
    torch.testing.assert_close(ours, plain, check_dtype=False)


def test_what_has_no_weights_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a computed tensor as 'scale', for example"):
        fit(1, Fast)

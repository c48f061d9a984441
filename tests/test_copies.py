"""Copies of the pipelined module, and what has its weights as well: as in plain Lightning."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
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

from lightning_gnnpipe.errors import UnsupportedError
from tests.helpers.cases import covering
from tests.helpers.trainers import datamodule, make_trainer

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


class Rows(Net):
    """Has a row of weights for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x + self.embedding.weight, edge_index)


class Module(L.LightningModule):
    """Trains a net, and writes down what it is told to look at."""

    def __init__(self, net: type[nn.Module] = Net) -> None:
        super().__init__()
        self.net = net()
        self.seen: list[Tensor] = []
        self.folder = ""

    def on_fit_end(self) -> None:
        torch.save(self.seen, f"{self.folder}/{self.global_rank}.pt")

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(data.x, data.edge_index), data.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


Make = Callable[[], Module]


def run(make: Make, num_stages: int, num_shards: int = 1) -> Module:
    """Train for three epochs, in which all ranks see the same; 0 stages is plain Lightning."""
    L.seed_everything(1, verbose=False)
    module = make()
    trainer = make_trainer(num_stages, 3, num_shards=num_shards)
    with tempfile.TemporaryDirectory() as module.folder:
        trainer.fit(module, datamodule=datamodule())
        module.seen, *others = [torch.load(path) for path in Path(module.folder).iterdir()]
    for seen in others:
        torch.testing.assert_close(seen, module.seen)
    return module


def assert_as_plain(make: Make, num_stages: int, num_shards: int = 1) -> Module:
    """Compare weights, buffers and what the module has seen; return ours."""
    plain, ours = run(make, 0), run(make, num_stages, num_shards)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), check_dtype=False)
    torch.testing.assert_close(ours.seen, plain.seen)
    return ours


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deep, twice": lambda net: copy.deepcopy(copy.deepcopy(net)),
    "pickled": lambda net: pickle.loads(pickle.dumps(net)),
    "averaged": lambda net: AveragedModel(net, use_buffers=True),
}


class Copies(Module):
    """Copies the net after the first step, and looks at the copy's outputs, then zeroed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_end(self, outputs: Any, data: Data, batch_idx: int) -> None:
        made, args = COPIES[self.how](self.net), (data.x, data.edge_index)
        assert type(getattr(made, "module", made)) is Net
        with torch.no_grad():
            self.seen += [made(*args), self.net(*args)]
            for parameter in made.parameters():
                parameter.zero_()
            self.seen.append(made(*args))
        loss = made(*args).square().sum()
        assert len(torch.autograd.grad(loss, list(made.parameters()), allow_unused=True)) == 10


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("how", "num_stages"), covering(COPIES, [1, 2], times=1))
def test_a_copy_has_a_life_of_its_own(how: str, num_stages: int) -> None:
    ours = assert_as_plain(lambda: Copies(how), num_stages)
    assert len(ours.seen) == 9 and all(not out.any() for out in ours.seen[2::3])


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


class Aliased(Module):
    """Its layers have a second name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        convs = self.net.convs
        part = nn.Sequential(*convs[:2])
        self.backbone = {"list": convs, "part": part}[how]

    def configure_callbacks(self) -> L.Callback:
        return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


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


class Swapped(Module):
    """Evaluates the net with an average of its weights by functional_call."""

    def on_fit_start(self) -> None:
        self.average = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def on_train_batch_end(self, outputs: Any, data: Data, batch_idx: int) -> None:
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                self.average[name].lerp_(p, 0.5)
            args = (data.x, data.edge_index)
            self.seen.append(functional_call(self.net, self.average, args))


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


class Cast(Module):
    """Computes in another precision from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.float()

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x.to(self.net.scale.dtype), data.edge_index)
        return F.cross_entropy(out, data.y)


class Writes(Module):
    """Clips gradients and halves, loads and copies weights by hand."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(nn.utils.clip_grad_norm_(self.parameters(), 0.1))
        nn.utils.clip_grad_value_(self.parameters(), 0.02)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.5)
            self.net.convs[0].lin_l.weight.data.clamp_(min=-0.1)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.load_state_dict({name: one * 0.9 for name, one in self.state_dict().items()})
        vector = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.9, self.parameters())
        self.seen.append(vector)


class Penalized(Module):
    """Decays its weights by hand, before and after the call of the net."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        before = torch.stack([p.square().sum() for p in self.net.parameters()]).sum()
        loss = super().training_step(data, batch_idx)
        return loss + 0.01 * (before + sum(p.abs().sum() for p in self.parameters()))


AS_PLAIN: list[tuple[Make, int, int]] = [  # with so many stages and shards
    *((kind, 2, 1) for kind in (Resting, Writes, Penalized, Swapped, Cast)),
    *((partial(kind, Rows), 1, 2) for kind in (Writes, Penalized)),
    (partial(Taught, True), 1, 1),
    (partial(Taught, False), 2, 1),
    (partial(Aliased, "list"), 2, 1),
    (partial(Aliased, "part"), 2, 1),
    (partial(Tied, False), 2, 1),
    *((partial(Tied, True), *where) for where in ((2, 1), (1, 2))),
    *((partial(Normed, how), 2, 1) for how in ("new", "orthogonal")),
    (partial(Normed, "old"), 1, 1),
]


@pytest.mark.some_cases(6)
@pytest.mark.parametrize(("make", "num_stages", "num_shards"), AS_PLAIN)
def test_what_shares_or_changes_weights_trains_as_plainly(
    make: Make, num_stages: int, num_shards: int
) -> None:
    assert_as_plain(make, num_stages, num_shards)


def test_what_has_no_weights_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a computed tensor as 'scale', for example"):
        run(Fast, 1)

"""Several forwards of the pipelined module before one backward: views, pairs, a second graph."""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import DeepGraphInfomax, GCNConv, SAGEConv

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.graph import chunk_order
from tests.helpers.graphs import communities
from tests.helpers.launch import SEED
from tests.helpers.reference import StaleOracle
from tests.helpers.trainers import quiet_trainer

NUM_STEPS = 4
CASE = communities(3)


class Net(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [GCNConv(num_features, 6), SAGEConv(6, 6), SAGEConv(6, 6), GCNConv(6, 4)]
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


def views(data: Data, kind: str, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs of each forward of a step."""
    first = data.x, data.edge_index
    if kind == "one":
        return [first]
    if kind == "shuffled":  # as Deep Graph Infomax corrupts features: new in every step
        order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(step))
        return [first, (data.x[order], data.edge_index)]
    if kind == "twice":
        return [first, first]
    if kind == "graphs":
        return [first, (data.x, data.edge_index.flip(0)), (2 * data.x, data.edge_index)]
    return [first, (data.x.cos(), data.edge_index)]


def loss_of(found: list[Tensor], step: int) -> Tensor:
    target = found[0].detach().roll(1, 0)
    return sum(((z - (i + 1) * target) ** 2).mean() * (i + 1) for i, z in enumerate(found))  # type: ignore[return-value]


class Module(L.LightningModule):
    def __init__(self, num_features: int, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net(num_features).double()
        self.kind = kind
        self.losses: list[float] = []

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        found = [self.net(*view) for view in views(data, self.kind, self.global_step)]
        with torch.no_grad():  # a target without gradients, between forward and backward
            teacher = self.net(data.x.sin(), data.edge_index)
        loss = loss_of(found, self.global_step) + ((found[0] - teacher) ** 2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def double() -> Data:
    data = CASE.data.clone()
    data.x = data.x.double()
    return data


def oracle_losses(kind: str, *, is_exact: bool) -> tuple[list[float], list[Tensor]]:
    """Train as the strategy must, each forward of a step with rows of its own."""
    data, module = double(), Module(CASE.data.x.size(1), kind)
    views_ = len(views(data, kind, 0))
    oracles = [StaleOracle(module.net, CASE.partition) for _ in range(views_)]
    optimizer, losses = module.configure_optimizers(), []
    for step in range(NUM_STEPS):
        order = chunk_order(CASE.num_chunks, epoch=step, seed=SEED, order="shuffled")
        found = []
        for call, (oracle, view) in enumerate(zip(oracles, views(data, kind, step), strict=True)):
            is_new = step == 0 or (kind == "shuffled" and call == 1)
            if is_exact or is_new:
                found.append(oracle.exact(*view))
            else:
                found.append(oracle.chunked(*view, order=order))
        with torch.no_grad():
            teacher = module.net(data.x.sin(), data.edge_index)
        loss = loss_of(found, step) + ((found[0] - teacher) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in module.parameters()]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("kind", "num_chunks", "layout"),
    [
        *product(["fixed", "twice", "graphs", "shuffled"], [1, 3], [(1, 1)]),
        ("graphs", 3, (2, 1)),
        ("shuffled", 3, (1, 2)),
    ],
)
def test_forwards_of_a_step_have_histories_of_their_own(
    kind: str, num_chunks: int, layout: tuple[int, int]
) -> None:
    losses, weights = oracle_losses(kind, is_exact=num_chunks == 1)
    module = Module(CASE.data.x.size(1), kind)
    fit(module, num_chunks, layout)
    if layout == (1, 1):
        assert module.losses == pytest.approx(losses, rel=1e-10)
    for found, expected in zip(module.parameters(), weights, strict=True):
        torch.testing.assert_close(found.detach(), expected, rtol=1e-9, atol=1e-10)


def fit(
    module: L.LightningModule, num_chunks: int, layout: tuple[int, int], **options: Any
) -> None:
    L.seed_everything(SEED, verbose=False)
    piped: dict[str, Any] | None = None
    if num_chunks:
        piped = {"num_chunks": num_chunks, "graph_parallel": layout[1], **options}
        piped |= {"partition": CASE.partition, "staleness": "constant"} if num_chunks > 1 else {}
    trainer = quiet_trainer(layout[0] * layout[1], piped, max_epochs=NUM_STEPS)
    trainer.fit(module, datamodule=FullGraphDataModule(double()))


def test_bytes_and_records_are_of_all_forwards_of_a_step() -> None:
    """One forward and three of the same size, on one device: chunks and halo rows."""
    counts = {}
    for kind in ("one", "graphs"):
        fit(Counting(CASE.data.x.size(1), kind, counts), 3, (1, 1))
    assert counts["graphs"] == 3 * counts["one"] > 0


class Counting(Module):
    def __init__(self, num_features: int, kind: str, counts: dict[str, int]) -> None:
        super().__init__(num_features, kind)
        self.counts = counts

    def on_train_batch_end(self, *_: Any) -> None:
        record = self.trainer.strategy.engine.last_step.record
        self.counts[self.kind] = len(record.events)


@pytest.mark.parametrize("options", [{"recompute": True}, {"history_dtype": torch.bfloat16}])
def test_forwards_of_a_step_take_the_options_of_histories(options: dict[str, Any]) -> None:
    module, plain = (Module(CASE.data.x.size(1), "graphs") for _ in range(2))
    fit(module, 3, (1, 1), **options)
    fit(plain, 3, (1, 1))
    rtol = 1e-9 if "recompute" in options else 0.05
    assert module.losses == pytest.approx(plain.losses, rel=rtol)


class Infomax(L.LightningModule):
    """PyG's DeepGraphInfomax: features in a new order in every step."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = DeepGraphInfomax(
            hidden_channels=4,
            encoder=Net(num_features),
            summary=lambda z, *args, **kwargs: z.mean(dim=0).sigmoid(),
            corruption=lambda x, edge_index: (x[torch.randperm(x.size(0))], edge_index),
        ).double()
        self.losses: list[float] = []

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        loss = self.model.loss(*self.model(data.x, data.edge_index))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Adversarial(Infomax):
    """FLAG: several forwards and backwards a step, each on features moved along their gradient."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.net = self.model.encoder
        self.automatic_optimization = False

    def training_step(self, data: Data, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        noise = torch.zeros_like(data.x).uniform_(-0.1, 0.1).requires_grad_()
        for _ in range(3):
            out = self.net(data.x + noise, data.edge_index)
            loss = (out - 1).square().mean() / 3
            self.manual_backward(loss)
            noise.data += 0.1 * noise.grad.sign()
            noise.grad = None
        self.losses.append(loss.item())
        optimizer.step()


class Pair(Infomax):
    """Two optimizers: a discriminator on rows of the encoder, then the encoder against it."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.net = self.model.encoder
        self.judge = nn.Linear(4, 1).double()
        self.automatic_optimization = False

    def training_step(self, data: Data, batch_idx: int) -> None:
        encoder, judge = self.optimizers()
        z = self.net(data.x, data.edge_index)
        real = torch.randn_like(z)
        loss = (self.judge(z.detach()) - self.judge(real)).mean()
        judge.zero_grad()
        self.manual_backward(loss)
        judge.step()
        again = self.net(data.x, data.edge_index.flip(0))
        fooled = (z - again).square().mean() - self.judge(z).mean()
        encoder.zero_grad()
        self.manual_backward(fooled)
        encoder.step()
        self.losses.append(fooled.item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(one.parameters(), lr=0.01) for one in (self.net, self.judge)]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("kind", [Infomax, Adversarial, Pair])
def test_habits_equal_a_plain_trainer_and_train_in_chunks(
    kind: type[Infomax], caplog: pytest.LogCaptureFixture
) -> None:
    plain, exact, chunked = (kind(CASE.data.x.size(1)) for _ in range(3))
    fit(plain, 0, (1, 1))
    fit(exact, 1, (1, 1))
    fit(chunked, 3, (1, 1))
    assert exact.losses == pytest.approx(plain.losses, rel=1e-9)
    assert chunked.losses == pytest.approx(plain.losses, rel=0.2)
    assert len(set(chunked.losses)) == NUM_STEPS


HABITS = {
    "two views, positives and negatives, or a second graph, before one backward": (
        "as plainly; each call has histories of its own",
        test_forwards_of_a_step_have_histories_of_their_own,
        *("fixed", "twice", "graphs"),
    ),
    "features that are shuffled in each step (`DeepGraphInfomax`)": (
        "as plainly; that call runs exactly",
        test_habits_equal_a_plain_trainer_and_train_in_chunks,
        "Infomax",
    ),
    "several backwards a step by `manual_backward` (FLAG)": (
        "as plainly; moved features run exactly",
        test_habits_equal_a_plain_trainer_and_train_in_chunks,
        "Adversarial",
    ),
    "two optimizers: an encoder and a discriminator": (
        "as plainly",
        test_habits_equal_a_plain_trainer_and_train_in_chunks,
        "Pair",
    ),
}

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
from tests.helpers.graphs import communities
from tests.helpers.launch import SEED
from tests.helpers.orders import order_of_step
from tests.helpers.reference import StaleOracle
from tests.helpers.trainers import quiet_trainer, weights

NUM_STEPS = 4
CASE = communities(3)
DATA = CASE.data.clone()
DATA.x = DATA.x.double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        convs = [GCNConv(DATA.x.size(1), 6), SAGEConv(6, 6), SAGEConv(6, 6), GCNConv(6, 4)]
        self.convs = nn.ModuleList(convs).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


def views(kind: str, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs of each forward of a step."""
    x, edges = DATA.x, DATA.edge_index
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))
    more = {
        "one": [],
        "fixed": [(x.cos(), edges)],
        "shuffled": [(x[order], edges)],  # as Deep Graph Infomax does: new in every step
        "twice": [(x, edges)],
        "graphs": [(x, edges.flip(0)), (2 * x, edges)],
    }
    return [(x, edges), *more[kind]]


class Module(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = Net(), kind
        self.losses: list[float] = []

    def loss(self, found: list[Tensor]) -> Tensor:
        with torch.no_grad():  # a target without gradients, between forward and backward
            teacher = self.net(DATA.x.sin(), DATA.edge_index)
        target = found[0].detach().roll(1, 0)
        terms = (((z - i * target) ** 2).mean() * i for i, z in enumerate(found, start=1))
        loss = sum(terms, ((found[0] - teacher) ** 2).mean())
        self.losses.append(loss.item())
        return loss

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        return self.loss([self.net(*view) for view in views(self.kind, self.global_step)])

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_events = len(self.trainer.strategy.engine.last_step.record.events)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train_by_oracle(kind: str, *, is_exact: bool) -> Module:
    """Train as the strategy must, each forward of a step with rows of its own."""
    module = Module(kind)
    oracles = [StaleOracle(module.net, CASE.partition) for _ in views(kind, 0)]
    optimizer = module.configure_optimizers()
    for step in range(NUM_STEPS):
        order = order_of_step(CASE.num_chunks, step, SEED)
        found = []
        for call, (oracle, view) in enumerate(zip(oracles, views(kind, step), strict=True)):
            is_new = step == 0 or (kind == "shuffled" and call == 1)
            if is_exact or is_new:
                found.append(oracle.exact(*view))
            else:
                found.append(oracle.chunked(*view, order=order))
        optimizer.zero_grad()
        module.loss(found).backward()
        optimizer.step()
    return module


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
    expected = train_by_oracle(kind, is_exact=num_chunks == 1)
    module = fit(Module(kind), num_chunks, layout)
    if layout == (1, 1):
        assert module.losses == pytest.approx(expected.losses, rel=1e-10)
    torch.testing.assert_close(weights(module), weights(expected), rtol=1e-9, atol=1e-10)


def fit(module: Any, num_chunks: int, layout: tuple[int, int] = (1, 1), **options: Any) -> Any:
    """Train `module`, plainly for 0 chunks; return it."""
    L.seed_everything(SEED, verbose=False)
    piped: dict[str, Any] | None = None
    if num_chunks:
        piped = {"num_chunks": num_chunks, "graph_parallel": layout[1], **options}
        piped |= {"partition": CASE.partition, "staleness": "constant"} if num_chunks > 1 else {}
    trainer = quiet_trainer(layout[0] * layout[1], piped, max_epochs=NUM_STEPS)
    trainer.fit(module, datamodule=FullGraphDataModule(DATA))
    return module


def test_bytes_and_records_are_of_all_forwards_of_a_step() -> None:
    """One forward and three of the same size, on one device: chunks and halo rows."""
    one, three = (fit(Module(kind), 3).num_events for kind in ("one", "graphs"))
    assert three == 3 * one > 0


@pytest.mark.parametrize("options", [{"recompute": True}, {"history_dtype": torch.bfloat16}])
def test_forwards_of_a_step_take_the_options_of_histories(options: dict[str, Any]) -> None:
    module, plain = fit(Module("graphs"), 3, **options), fit(Module("graphs"), 3)
    rtol = 1e-9 if "recompute" in options else 0.05
    assert module.losses == pytest.approx(plain.losses, rel=rtol)


class Infomax(L.LightningModule):
    """PyG's DeepGraphInfomax: features in a new order in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DeepGraphInfomax(
            hidden_channels=4,
            encoder=Net(),
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

    def __init__(self) -> None:
        super().__init__()
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


class Pair(Adversarial):
    """Two optimizers: a discriminator on rows of the encoder, then the encoder against it."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(4, 1).double()

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
def test_habits_equal_a_plain_trainer_and_train_in_chunks(kind: type[Infomax]) -> None:
    plain, exact, chunked = (fit(kind(), num_chunks) for num_chunks in (0, 1, 3))
    assert exact.losses == pytest.approx(plain.losses, rel=1e-9)
    assert chunked.losses == pytest.approx(plain.losses, rel=0.2)
    assert len(set(chunked.losses)) == NUM_STEPS

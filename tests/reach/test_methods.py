"""Methods other than forward are pipelined, whoever calls them, and equal to plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.models import GAE, VGAE

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.steps import model
from tests.helpers.alike import D, N, graph
from tests.helpers.launch import BatchList
from tests.helpers.trainers import double_precision, quiet_trainer, weights

H = 4


class Encoder(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(H if i else D, H) for i in range(depth))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = gnn.GCNConv(D, H)
        self.conv_mu, self.conv_logstd = gnn.GCNConv(H, H), gnn.GCNConv(H, H)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv1(x, edge_index).relu()
        return self.conv_mu(x, edge_index), self.conv_logstd(x, edge_index)


class Net(nn.Module):
    """Has no forward; `head` belongs to the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = gnn.GCNConv(D, H), gnn.SAGEConv(H, H)
        self.conv3 = gnn.GCNConv(H, H)
        self.head = nn.Linear(H, H)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.conv1.reset_parameters()

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x, edge_index).relu(), edge_index).relu()
        return self.conv3(x, edge_index)

    def decode(self, z: Tensor, pairs: Tensor) -> Tensor:
        return (self.head(z[pairs[0]]) * z[pairs[1]]).sum(-1)


class NetWithForward(Net):
    """Its forward is for evaluation, as in many examples of link prediction."""

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        return self.decode(self.encode(x, edge_index), pairs)


class Several(Net):
    """Two methods with message passing; the second reads a layer of the first."""

    def smooth(self, z: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv3(z, edge_index)


class Module(L.LightningModule):
    """Trains `net` on `_rows`; `score` returns what is compared in validation."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []
        self.seen: list[Tensor] = []

    def _rows(self, data: Data) -> Tensor:
        return self.net.encode(data.x, data.edge_index)

    def loss(self, data: Data) -> Tensor:
        pairs = torch.cat([data.edge_index, data.pairs], dim=1)
        labels = torch.ones(pairs.size(1), dtype=data.x.dtype)
        labels[data.edge_index.size(1) :] = 0
        decoded = self.net.decode(self._rows(data), pairs)
        return F.binary_cross_entropy_with_logits(decoded, labels)

    def score(self, data: Data) -> Tensor:
        return self._rows(data)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        torch.manual_seed(self.current_epoch)
        loss = self.loss(data)
        self.losses.append(float(loss.detach()))
        self.outputs = loss.detach().view(1)
        self.log("train_loss", loss, batch_size=1)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, GNNPipeStrategy) and strategy.engine.graphs.trained:
            self.num_chunks = strategy.engine.graphs.trained.graph.plan.num_chunks

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.seen.append(self.score(data).clone())
        self.log("val_loss", self.seen[-1].square().mean(), batch_size=1)

    def predict_step(self, data: Data, batch_idx: int) -> Tensor:
        return self.score(data)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Auto(Module):
    def loss(self, data: Data) -> Tensor:
        z = self._rows(data)
        loss = self.net.recon_loss(z, data.edge_index, data.pairs)
        return loss + (self.net.kl_loss() / N if isinstance(self.net, VGAE) else 0)


class Predictor(Module):
    """Trains `encode`, evaluates by forward."""

    def score(self, data: Data) -> Tensor:
        return self.net(data.x, data.edge_index, data.pairs)


class Twice(Module):
    """Calls two methods in each step; the second one runs on the whole graph."""

    def _rows(self, data: Data) -> Tensor:
        return super()._rows(data) + self.net.smooth(data.x[:, :H], data.edge_index)


class Copying(Module):
    """A copy of the network runs its own methods."""

    def loss(self, data: Data) -> Tensor:
        loss = super().loss(data)
        twin = copy.deepcopy(self.net)
        with torch.no_grad():
            rows = twin.encode(data.x, data.edge_index)
        return loss + rows.mean()


class Nodes(Module):
    """Classifies nodes by `_rows`."""

    def loss(self, data: Data) -> Tensor:
        return F.cross_entropy(self._rows(data), data.y)


class Helper(Nodes):
    """Layers of the LightningModule itself, called by a method of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = gnn.GCNConv(D, H), gnn.GATConv(H, H)

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    def _rows(self, data: Data) -> Tensor:
        return self.embed(data.x, data.edge_index)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.embed(x, edge_index).softmax(-1)

    def score(self, data: Data) -> Tensor:
        return self(data.x, data.edge_index)


class OneCalled(Nodes):
    """Two networks; training calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.unused = Encoder(), Encoder()

    def _rows(self, data: Data) -> Tensor:
        return self.encoder(data.x, data.edge_index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.encoder.parameters(), lr=0.1)


class InTurn(OneCalled):
    """Trains network and head, the head alone without gradients of the network, or on its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.unused = nn.Linear(H, H), nn.Identity()

    def _rows(self, data: Data) -> Tensor:
        if self.trainer.training and self.current_epoch % 3 == 2:
            return self.head(self.rows)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.current_epoch % 3 == 1):
            self.rows = super()._rows(data)
        return self.head(self.rows)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.encoder.parameters(), *self.head.parameters()], lr=0.1)


class HeadFirst(InTurn):
    """Its first step does not call the network."""

    def _rows(self, data: Data) -> Tensor:
        if self.trainer.training and self.current_epoch == 0:
            return self.head(torch.ones(N, H, dtype=data.x.dtype))
        return self.head(self.encoder(data.x, data.edge_index))


class Anneals(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(1.0), requires_grad=False)

    def forward(self, x: Tensor, edge_index: Tensor, tau: float = 1.0) -> Tensor:
        for conv in self.convs:
            x = conv(x * (1.5 - tau) + x * self.tau, edge_index).relu()
        return x / tau


class Decides(Anneals):
    def forward(self, x: Tensor, edge_index: Tensor, tau: float = 1.0) -> Tensor:
        """Look at the float in ways that a placeholder would answer wrongly, without an error."""
        scale = {1.0: 3.0, 0.9: 5.0}.get(tau, 1.0) if isinstance(tau, float) else 7.0
        return super().forward(-x if tau < 0 else x * scale, edge_index, tau)


class Annealed(OneCalled):
    """A number is another in each epoch: an argument, or if it `is_held` a parameter."""

    def __init__(self, kind: type[Anneals] = Anneals, *, is_held: bool = False) -> None:
        super().__init__()
        self.encoder, self.unused, self.is_held = kind(), nn.Identity(), is_held

    def on_train_epoch_start(self) -> None:
        self.encoder.tau.data.fill_(0.9**self.current_epoch if self.is_held else 1.0)

    def _rows(self, data: Data) -> Tensor:
        tau = 0.9 ** (2 * self.current_epoch + (not self.training))
        return self.encoder(data.x, data.edge_index, *([] if self.is_held else [tau]))


# Each with what `pipelined_module` names.
CASES: dict[str, tuple[Callable[[], Module], str | None]] = {
    "GAE of one layer": (lambda: Auto(GAE(gnn.GCNConv(D, H))), "net.encode"),
    "VGAE": (lambda: Auto(VGAE(Variational())), None),
    "encode, evaluated by forward": (lambda: Predictor(NetWithForward()), "net.encode"),
    "two methods": (lambda: Twice(Several()), "net.encode"),
    "a copy": (lambda: Copying(Net()), "net.encode"),
    "layers of the LightningModule": (Helper, "embed"),
    "one of two networks": (OneCalled, "encoder"),
    "the head alone in turn": (InTurn, None),
    "the head alone first": (HeadFirst, None),
}


DATA = graph(y=torch.arange(N) % H)
LOADER = BatchList([DATA])


def fit(
    case: str | Callable[[], Module], num_chunks: int, devices: int = 1, **options: Any
) -> tuple[Module, L.Trainer]:
    """Train for three epochs; plainly for 0 chunks."""
    make, name = CASES[case] if isinstance(case, str) else (case, None)
    options = {"pipelined_module": name, **options}
    module, trainer = fresh(make), trainer_of(num_chunks, devices, **options)
    trainer.fit(module, LOADER, LOADER)
    return module, trainer


def trainer_of(num_chunks: int, devices: int = 1, **options: Any) -> L.Trainer:
    piped = {"num_chunks": num_chunks, **options} if num_chunks else None
    return quiet_trainer(devices, piped, max_epochs=3)


def assert_same(found: Module, plain: Module) -> None:
    assert found.losses == pytest.approx(plain.losses, rel=0, abs=1e-9)
    torch.testing.assert_close(found.seen, plain.seen, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights(found), weights(plain), rtol=0, atol=1e-9)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_in_exact_mode_it_is_equal_to_plain(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_same(fit(name, 1)[0], fit(name, 0)[0])
    text = "The first training step does not call encoder.forward, and runs without"
    assert caplog.text.count(text) == (name == "the head alone first")


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_in_chunks_and_validates_exactly(name: str) -> None:
    module, trainer = fit(name, 3, balance="uniform")
    assert len(module.losses) == module.num_chunks == 3
    module.seen.clear()
    for one in (trainer, trainer_of(0)):
        one.validate(module, LOADER, verbose=False)
    torch.testing.assert_close(*module.seen, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["two methods", "the head alone first"])
def test_stages_train_as_plain(case: str) -> None:
    """Every rank runs the second method, with weights of the last stage."""
    found, plain = (weights(fit(case, *given)[0]) for given in ((1, 2), (0, 1)))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-9)


def test_a_sequential_of_pyg_keeps_a_forward_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG writes one for each instance; that of the class belongs to the last one made."""

    class InOrder(Nodes):
        def __init__(self) -> None:
            super().__init__()
            layers = [(gnn.GCNConv(D, H), "x, e -> x"), nn.ReLU(), (gnn.GCNConv(H, H), "x, e -> x")]
            self.net = gnn.Sequential("x, e", layers)
            vars(self.net)["forward"] = self.net.forward

        def _rows(self, data: Data) -> Tensor:
            return self.net(data.x, data.edge_index)

        def loss(self, data: Data) -> Tensor:
            return self._rows(data).square().mean()

    made = fresh(InOrder)

    def of_another(*args: Any) -> Tensor:
        raise AssertionError("the forward of another Sequential")

    monkeypatch.setattr(gnn.Sequential, "forward", of_another)
    found, plain = (fit(lambda: copy.deepcopy(made), number)[0] for number in (1, 0))
    assert_same(found, plain)


def test_a_plan_needs_a_step_that_calls_the_network() -> None:
    class Late(Module):
        def training_step(self, data: Data, batch_idx: int) -> Tensor:
            return data.x.sum()

    with pytest.raises(
        ConfigError, match=r"to call net\.forward, which is planned for \(got a first"
    ):
        GNNPipeStrategy().plan(fresh(lambda: Late(NetWithForward())), DATA)


def fresh(make: Callable[[], Module]) -> Module:
    with double_precision():
        torch.manual_seed(0)
        return make()


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (Annealed, ["because 'tau', a float of the", "nn.Parameter"]),
        (lambda: Annealed(Decides), ["traced anew each time that its argument 'tau' changes."]),
        (lambda: Annealed(is_held=True), []),
    ],
    ids=["as an argument", "to decide on", "as a weight"],
)
def test_a_float_that_a_schedule_changes_is_named(
    make: Callable[[], Annealed],
    texts: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps on another input are exact; those with other weights are not."""
    traced = Mock(wraps=model.cut_module)
    monkeypatch.setattr(model, "cut_module", traced)
    module, _ = fit(make, 3)
    assert traced.call_count == (7 if texts else 2)
    assert all(caplog.text.count(text) == 1 for text in texts)
    assert ("traced anew" in caplog.text) == bool(texts)
    assert ("ran exactly" in caplog.text) == bool(texts)
    if texts:
        assert_same(module, fit(make, 0)[0])


def test_what_is_named_must_exist() -> None:
    for wrong in ("net.embed", "net.conv1.nothing", "embeds", "losses"):
        with pytest.raises(ConfigError, match="a submodule of the LightningModule, or a method"):
            fit("layers of the LightningModule", 3, pipelined_module=wrong)


class Bare(Module):
    """Its training_step calls the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = gnn.GCNConv(D, H), gnn.GCNConv(H, H)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        x = self.conv1(data.x, data.edge_index).relu()
        return F.cross_entropy(self.conv2(x, data.edge_index), data.y)


# How a refusal begins, and the first name that it shows.
REFUSED: dict[str, tuple[Callable[[], Module], dict[str, str], str, str]] = {
    "one by one": (
        Bare,
        {},
        "Message passing is in 'conv1' and 'conv2', without a forward",
        "",  # it calls no method
    ),
    "a method": (lambda: Module(Net()), {}, "Message passing is in 'net', without", "net.encode"),
    "named": (
        lambda: Module(Net()),
        {"pipelined_module": "net"},
        *("'net' has no forward. Name the module or", "net.encode"),
    ),
    "two networks": (OneCalled, {}, "Message passing is in 'encoder' and 'unused', w", "encoder"),
    "beside forward": (
        lambda: Module(NetWithForward()),
        {},
        *("training_step does not call forward of 'net', which is pipelined. Name", "net.encode"),
    ),
    "not this method": (
        Helper,
        {"pipelined_module": "score"},
        *("training_step does not call score of the LightningModule, which is", "loss"),
    ),
}


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("case", REFUSED)
def test_what_training_does_not_call_is_refused_with_what_to_write(case: str) -> None:
    make, options, fact, name = REFUSED[case]
    with pytest.raises(UnsupportedError) as error:
        fit(make, 3, **options)
    text = str(error.value)
    assert text.startswith(fact)
    shown = f'training_step calls:\n    GNNPipeStrategy(pipelined_module="{name}")\n'
    assert shown in text if name else "pipelined_module" not in text
    assert "    def forward(self, x, edge_index):\n        x = self.conv1(" in text
    if "does not call" in fact:
        with pytest.raises(UnsupportedError, match="training_step does not call"):
            GNNPipeStrategy(num_chunks=2, **options).plan(fresh(make), DATA, num_stages=1)


def test_a_plan_is_of_the_method_that_is_called() -> None:
    module = fresh(CASES["encode, evaluated by forward"][0])
    strategy = GNNPipeStrategy(num_chunks=2, pipelined_module="net.encode")
    plan = strategy.plan(module, DATA, num_stages=2)
    assert len(plan.layer_names) == 3
    assert "encode" not in vars(module.net)

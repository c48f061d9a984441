"""Methods other than forward are pipelined, whoever calls them, and equal to plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn.models import ARGVA, GAE, VGAE

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from tests.helpers.launch import BatchList, assert_transparent, fit_batches
from tests.helpers.trainers import double_precision, quiet_trainer, weights

N, D, H = 30, 5, 4


def graph(seed: int = 0) -> Data:
    """A cycle with chords, and as many pairs that are no edges."""
    generator = torch.Generator().manual_seed(seed)
    ring = torch.arange(N)
    edges = torch.cat([torch.stack([ring, (ring + k) % N]) for k in (1, 2, 7)], dim=1)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return Data(
        x=x,
        edge_index=torch.cat([edges, edges.flip(0)], dim=1),
        non_edge_index=torch.stack([ring, (ring + 11) % N]),
        y=torch.arange(N) % H,
    )


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
        self.folder: Path | None = None

    def _rows(self, data: Data) -> Tensor:
        return self.net.encode(data.x, data.edge_index)

    def loss(self, data: Data) -> Tensor:
        pairs = torch.cat([data.edge_index, data.non_edge_index], dim=1)
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

    def on_fit_end(self) -> None:
        if self.folder is not None:  # of a test with several processes
            torch.save((self.losses, self.seen), self.folder / f"{self.global_rank}.pt")

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
        loss = self.net.recon_loss(z, data.edge_index, data.non_edge_index)
        return loss + (self.net.kl_loss() / N if isinstance(self.net, VGAE) else 0)


class Adversarial(Module):
    """Two optimizers, one of them of the encoder, in the steps of PyG's example."""

    def __init__(self) -> None:
        discriminator = nn.Sequential(nn.Linear(H, H), nn.ReLU(), nn.Linear(H, 1))
        super().__init__(ARGVA(Variational(), discriminator))
        self.automatic_optimization = False

    def training_step(self, data: Data, batch_idx: int) -> None:
        torch.manual_seed(self.current_epoch)
        of_encoder, of_discriminator = self.optimizers()
        z = self._rows(data)
        for _ in range(2):
            of_discriminator.zero_grad()
            self.manual_backward(self.net.discriminator_loss(z))
            of_discriminator.step()
        loss = self.net.recon_loss(z, data.edge_index, data.non_edge_index)
        loss = loss + self.net.reg_loss(z) + self.net.kl_loss() / N
        of_encoder.zero_grad()
        self.manual_backward(loss)
        of_encoder.step()
        self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        rest = (self.net.encoder, self.net.discriminator)
        return [torch.optim.Adam(one.parameters(), lr=0.02) for one in rest]


class Predictor(Module):
    """Trains `encode`, evaluates by forward."""

    def score(self, data: Data) -> Tensor:
        return self.net(data.x, data.edge_index, data.non_edge_index)


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


class HelperBesideForward(Helper):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.embed(x, edge_index).softmax(-1)

    def score(self, data: Data) -> Tensor:
        return self(data.x, data.edge_index)


class Private(Nodes):
    """A method with an underscore, and the graph as its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.GCNConv(D, H), gnn.GCNConv(H, H)])

    def _rows(self, data: Data) -> Tensor:
        x = data.x
        for conv in self.convs:
            x = torch.tanh(conv(x, data.edge_index))
        return x


class OneCalled(Nodes):
    """Two networks; training calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.unused = Encoder(), Encoder()

    def _rows(self, data: Data) -> Tensor:
        return self.encoder(data.x, data.edge_index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.encoder.parameters(), lr=0.1)


class Backbone(OneCalled):
    """A second name for the layers, as BackboneFinetuning wants it."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused
        self.backbone = self.encoder.convs


class Inference(OneCalled):
    """Evaluates by a second method."""

    class Encoder(Encoder):
        def inference(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for conv in self.convs:
                x = conv(x, edge_index)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.unused = self.Encoder(), nn.Identity()

    def score(self, data: Data) -> Tensor:
        return self.encoder.inference(data.x, data.edge_index)


CASES: dict[str, Callable[[], Module]] = {
    "GAE": lambda: Auto(GAE(Encoder())),
    "GAE of one layer": lambda: Auto(GAE(gnn.GCNConv(D, H))),
    "VGAE": lambda: Auto(VGAE(Variational())),
    "ARGVA, two optimizers": Adversarial,
    "encode and decode": lambda: Module(Net()),
    "encode, evaluated by forward": lambda: Predictor(NetWithForward()),
    "encode beside forward": lambda: Module(NetWithForward()),
    "two methods": lambda: Twice(Several()),
    "a copy": lambda: Copying(Net()),
    "layers of the LightningModule": Helper,
    "layers of the LightningModule, with forward": HelperBesideForward,
    "a private method": Private,
    "one of two networks": OneCalled,
    "a backbone": Backbone,
    "another method in evaluation": Inference,
}


def fit(
    make: Callable[[], Module], num_chunks: int, devices: int = 1, **options: Any
) -> tuple[Module, L.Trainer]:
    """Train for three epochs; plainly for 0 chunks."""
    module, trainer = fresh(make), trainer_of(num_chunks, devices, **options)
    trainer.fit(module, BatchList([graph()]), BatchList([graph()]))
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
def test_in_exact_mode_it_is_equal_to_plain(name: str) -> None:
    found, _ = fit(CASES[name], 1)
    assert_same(found, fit(CASES[name], 0)[0])


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_in_chunks_and_validates_exactly(name: str) -> None:
    module, trainer = fit(CASES[name], 3, balance="uniform")
    assert len(module.losses) == module.num_chunks == 3
    module.seen.clear()
    for one in (trainer, trainer_of(0)):
        one.validate(module, BatchList([graph()]), verbose=False)
    torch.testing.assert_close(*module.seen, rtol=0, atol=1e-10)


def test_predict_is_equal_to_plain() -> None:
    module, trainer = fit(lambda: Predictor(NetWithForward()), 3)
    found, plain = (one.predict(module, BatchList([graph()])) for one in (trainer, trainer_of(0)))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


def test_stages_train_as_plain(tmp_path: Path) -> None:
    """Every rank runs the second method, with weights of the last stage."""

    def make() -> Module:
        module = CASES["two methods"]()
        module.folder = tmp_path
        return module

    plain, _ = fit(make, 0)
    module, _ = fit(make, 1, devices=2)
    for rank in range(2):
        module.losses, module.seen = torch.load(tmp_path / f"{rank}.pt")
        assert_same(module, plain)


def test_replicas_average_weights_of_the_decoder(tmp_path: Path) -> None:
    found, plain = (
        fit_batches(
            fresh(CASES["encode and decode"]),
            DataLoader([graph(seed) for seed in range(8)], batch_size=2),
            num_stages=num_stages,
            num_replicas=2,
            num_chunks=2,
            tmp_path=tmp_path,
        )
        for num_stages in (1, 0)
    )
    assert_transparent(found, plain)


def fresh(make: Callable[[], Module]) -> Module:
    with double_precision():
        torch.manual_seed(0)
        return make()


def test_a_second_method_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fit(CASES["two methods"], 3)
    text = "'smooth' is called beside 'encode', the pipelined method: from pipelined layers to"
    assert sum(one.startswith(text) for one in caplog.messages) == 1
    caplog.clear()
    fit(CASES["encode, evaluated by forward"], 3)
    assert not any("is called beside" in one for one in caplog.messages)  # it calls encode


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("net.encode", "encode, evaluated by forward"),
        ("net", "encode, evaluated by forward"),
        ("embed", "layers of the LightningModule, with forward"),
    ],
)
def test_a_method_can_be_named(name: str, case: str) -> None:
    module, _ = fit(CASES[case], 3, pipelined_module=name)
    assert module.num_chunks == 3
    for wrong in ("net.embed", "net.conv1.nothing", "embeds", "losses"):
        with pytest.raises(ConfigError, match="a submodule of the LightningModule, or a method"):
            fit(CASES[case], 3, pipelined_module=wrong)


class Bare(Module):
    """Its training_step calls the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = gnn.GCNConv(D, H), gnn.GCNConv(H, H)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        x = self.conv1(data.x, data.edge_index).relu()
        return F.cross_entropy(self.conv2(x, data.edge_index), data.y)


class LayerByLayer(Helper):
    """The same, beside another method."""

    training_step = Bare.training_step


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Bare, "in one method of the LightningModule (got 'conv1' and 'conv2')"),
        (LayerByLayer, "to call the pipelined module 'self' (got no call of its embed)"),
    ],
)
def test_layers_called_one_by_one_are_refused_with_what_to_write(
    make: Callable[[], Module], text: str
) -> None:
    with pytest.raises(UnsupportedError) as error:
        fit(make, 3)
    assert text in str(error.value)
    assert "    def embed(self, x, edge_index):\n        x = self.conv1(" in str(error.value)


def test_a_plan_is_of_the_method_that_is_called() -> None:
    module = fresh(CASES["encode, evaluated by forward"])
    plan = GNNPipeStrategy(num_chunks=2).plan(module, graph(), num_stages=2)
    assert sum(stage.num_layers for stage in plan.stages) == 3
    assert "encode" not in vars(module.net)


trains = test_it_trains_in_chunks_and_validates_exactly
HABITS = {
    "`encode` of GAE, VGAE, ARGVA": (
        "as plainly; `encode` is pipelined",
        trains,
        *("GAE", "GAE of one layer", "VGAE", "ARGVA, two optimizers"),
    ),
    "`encode` and `decode` of a network, with or without `forward`": (
        "as plainly; `encode` is pipelined, each device decodes",
        trains,
        *("encode and decode", "encode, evaluated by forward", "encode beside forward"),
    ),
    "a second method with message passing": (
        "as plainly; runs on the whole graph on each device, which a warning says",
        trains,
        "two methods",
    ),
    "another method in evaluation (`inference`)": (
        "as plainly",
        trains,
        "another method in evaluation",
    ),
    "layers as attributes of the LightningModule, called by a method of it": (
        "as plainly; that method is pipelined",
        trains,
        *("layers of the LightningModule", "layers of the LightningModule, with forward"),
        "a private method",
    ),
    "layers called one by one in `training_step`": (
        "refused: call them in a method",
        test_layers_called_one_by_one_are_refused_with_what_to_write,
    ),
    "two networks, of which training calls one": (
        "as plainly; that one is pipelined",
        trains,
        "one of two networks",
    ),
    "a second name for the layers (`self.backbone`)": ("as plainly", trains, "a backbone"),
    "`copy.deepcopy(net)` in `training_step`": ("as plainly on one stage", trains, "a copy"),
}

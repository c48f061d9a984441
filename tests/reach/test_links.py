"""Link prediction on one graph: a split of edges, and new negative pairs in each epoch."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
import torch_geometric.transforms as T
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.utils import negative_sampling

from lightning_gnnpipe import GNNPipeStrategy
from tests.helpers.alike import D, graph
from tests.helpers.trainers import quiet_trainer, weights

W = 8


def split() -> list[Data]:
    """Return the graphs of training, validation and test, with edges in both directions."""
    L.seed_everything(0, verbose=False)
    data = graph(edge_attr=None)
    data.edge_index = torch.cat([data.edge_index, data.edge_index.flip(0)], dim=1)
    transform = T.RandomLinkSplit(0.1, 0.1, is_undirected=True, add_negative_train_samples=False)
    return list(transform(data.coalesce()))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.GCNConv(D, W), gnn.SAGEConv(W, W), gnn.GCNConv(W, W)])

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)

    def decode(self, z: Tensor, pairs: Tensor) -> Tensor:
        return (z[pairs[0]] * z[pairs[1]]).sum(-1)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, 1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.lins(one * other).squeeze(-1)


class Whole(Encoder):
    """Encoder and decoder in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor) -> Tensor:
        z = self.encode(x, edge_index)
        source, target = edge_label_index
        return self.decoder(z[source], z[target])


class Links(L.LightningModule):
    """The decoder is a method of the network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.num_exact, self.seen = net, 0, torch.empty(0)

    def score(self, data: Data, pairs: Tensor) -> Tensor:
        return self.net.decode(self.net.encode(data.x, data.edge_index), pairs)

    def scores(self, data: Data, negative: Tensor) -> tuple[Tensor, Tensor]:
        both = self.score(data, torch.cat([data.edge_label_index, negative], dim=1))
        return both.split([data.edge_label_index.size(1), negative.size(1)])  # type: ignore

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        L.seed_everything(self.current_epoch, verbose=False)
        pairs = negative_sampling(data.edge_index, data.num_nodes, data.edge_label_index.size(1))
        positive, negative = self.scores(data, pairs)
        return -F.logsigmoid(positive).mean() - F.logsigmoid(-negative).mean()

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.seen = self.score(data, data.edge_label_index).sigmoid()

    def on_train_batch_end(self, *_: object) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, GNNPipeStrategy):
            self.num_exact += strategy.engine.last_step.record.is_exact

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Apart(Links):
    """The decoder is in forward, which runs for positive and negative pairs in a call each."""

    def score(self, data: Data, pairs: Tensor) -> Tensor:
        return self.net(data.x, data.edge_index, edge_label_index=pairs)

    def scores(self, data: Data, negative: Tensor) -> tuple[Tensor, Tensor]:
        return self.score(data, data.edge_label_index), self.score(data, negative)


class InBatches(Links):
    """Pairs in batches: several forwards, backwards and steps of the optimizer per epoch.

    The decoder is a module beside the encoder.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.predictor = Decoder()
        self.automatic_optimization = False

    def score(self, data: Data, pairs: Tensor) -> Tensor:
        z = self.net.encode(data.x, data.edge_index)
        return self.predictor(z[pairs[0]], z[pairs[1]])

    def training_step(self, data: Data, batch_idx: int) -> None:  # type: ignore[override]
        L.seed_everything(self.current_epoch, verbose=False)
        optimizer, known = self.optimizers(), data.edge_label_index
        for rows in DataLoader(range(known.size(1)), 40, shuffle=True):
            optimizer.zero_grad()
            pairs = negative_sampling(data.edge_index, data.num_nodes, rows.numel())
            both = self.score(data, torch.cat([known[:, rows], pairs], dim=1))
            signs = torch.ones_like(both)
            signs[rows.numel() :] = -1
            self.manual_backward(-F.logsigmoid(signs * both).mean())
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            optimizer.step()


Make = Callable[[], nn.Module]
KINDS: list[tuple[type[Links], Make]] = [(Links, Encoder), (Apart, Whole), (InBatches, Encoder)]


def fit(kind: type[Links], net: Make, chunks: int, stages: int = 1) -> Links:
    train, val, _ = split()
    L.seed_everything(1, verbose=False)
    module = kind(net()).double()
    options = {"max_epochs": 4, "num_sanity_val_steps": 0}
    piped = {"num_chunks": chunks, "pipelined_module": "net.encode" if net is Encoder else None}
    trainer = quiet_trainer(stages, piped if chunks else None, **options)
    trainer.fit(module, *(DataLoader([one], batch_size=None) for one in (train, val)))
    return module


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("kind", "net"), KINDS)
def test_links_train_in_chunks(kind: type[Links], net: Make) -> None:
    """Pairs that are new in each epoch leave the rows of neighbours as they are."""
    plain, exact, chunked = (fit(kind, net, chunks) for chunks in (0, 1, 3))
    torch.testing.assert_close(weights(exact), weights(plain), rtol=0, atol=1e-9)
    torch.testing.assert_close(exact.seen, plain.seen, rtol=0, atol=1e-9)
    assert chunked.num_exact <= 1
    assert not torch.equal(weights(chunked), weights(plain))
    validation = split()[1]
    with torch.no_grad():
        expected = chunked.eval().score(validation, validation.edge_label_index).sigmoid()
    torch.testing.assert_close(chunked.seen, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(chunked.seen, plain.seen, rtol=0, atol=0.1)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("kind", "net"), KINDS[1:])
def test_links_train_in_two_stages(kind: type[Links], net: Make) -> None:
    one, two = fit(kind, net, 3), fit(kind, net, 3, stages=2)
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-9)

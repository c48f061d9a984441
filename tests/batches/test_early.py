"""Losses of which micro-batches cannot go back at once are refused, and so is what else cannot."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from tests.helpers.batches import draw_batch
from tests.helpers.observed import make_data, make_module
from tests.helpers.staged import FreshBatches, Staged
from tests.helpers.trainers import make_trainer

BATCHES = [draw_batch((4, 7, 1, 9, 5, 6), seed) for seed in range(2)]


class Joined(Staged):
    """Losses that join graphs, and steps that are not the same when they run again."""

    def loss(self, kind: str, predicted: Tensor, nodes: Tensor, data: Any) -> Tensor:
        mean = super().loss("mean over graphs", predicted, nodes, data)
        match kind:
            case "root":
                return mean.sqrt()
            case "contrast":
                return mean + 0.1 * (predicted @ predicted.T).softmax(-1).diagonal().mean()
            case "norm over graphs":
                return ((predicted - predicted.mean(0)) / predicted.std(0) - data.y).square().mean()
            case "hardest":
                return (predicted - data.y).square().flatten().topk(5).values.sum()
            case "another each time":
                return mean * float(torch.empty(1).uniform_(generator=self.draw))
            case "none":
                return None  # type: ignore[return-value]
            case "writes":
                data.y /= 2
                return mean
            case "gathers":
                return mean + self.all_gather(mean.detach()).mean()
            case "calls twice":
                again = self.net(data.x, data.edge_index, data.batch, data.num_graphs)
                return mean + again["nodes"].mean()
            case "calls twice, without gradients":
                with torch.no_grad():
                    self.net(data.x, data.edge_index, data.batch, data.num_graphs)
                return mean
        raise KeyError(kind)

    draw = torch.Generator().manual_seed(0)


JOINS = "not to depend on the outputs of other micro-batches"


def fit(module: L.LightningModule, *data: Any, devices: int = 1, **options: Any) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    options = {"schedule": "1f1b", "num_chunks": 3, "start_method": "fork", **options}
    trainer = make_trainer(devices, 1, strategy=GNNPipeStrategy(**options), callbacks=[])
    trainer.fit(module, *(data or [FreshBatches(BATCHES)]))
    return trainer


@pytest.mark.some_cases(4)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("root", JOINS),
        ("contrast", JOINS),
        ("norm over graphs", JOINS),
        ("hardest", JOINS),
        ("another each time", JOINS),
        ("none", "training_step to return a loss, since training_step runs again"),
        ("writes", "training_step not to change the batch in place"),
        ("gathers", "no collective call in training_step"),
        ("calls twice", "call the pipelined module once.*a second call"),
        ("calls twice, without gradients", r"a call in torch.no_grad\(\)"),
    ],
)
def test_losses_that_join_graphs_are_refused(kind: str, message: str) -> None:
    module = Joined((kind,))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(UnsupportedError, match=message) as raised:
        fit(module)
    assert "fill_drain" in str(raised.value)
    for name, parameter in module.named_parameters():  # nothing was changed
        assert torch.equal(parameter, before[name])
    assert "log" not in vars(module) and "all_gather" not in vars(module)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kind", ["root", "contrast", "norm over graphs", "hardest"])
def test_they_are_right_under_fill_drain_and_in_one_micro_batch(kind: str) -> None:
    fit(Joined((kind,)), schedule="fill_drain")
    fit(Joined((kind,)), num_chunks=1)


class Manual(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterates(Staged):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (Manual, {}, "automatic optimization, since training_step runs again"),
        (Iterates, {}, "to take a batch, since training_step runs again"),
        (Staged, {"schedule": "gpipe"}, "'schedule' to be one of fill_drain, 1f1b, interleaved"),
        (Staged, {"schedule": "interleaved", "num_virtual": 0}, "'num_virtual' to be at least 1"),
        (Staged, {"graph_parallel": 2}, "'graph_parallel' to be 1 with schedule='1f1b'"),
        (
            Staged,
            {"schedule": "interleaved", "num_virtual": 4, "devices": 2},
            r"2 ranks with 4 stages each and 7 layers.*num_virtual=3",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_setup(make: Any, options: Any, text: str) -> None:
    kind = Exception if "devices" in options else (ConfigError, UnsupportedError)
    with pytest.raises(kind, match=text):
        fit(make(), **options)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_one_graph_is_refused(schedule: str) -> None:
    text = f"batches of graphs where schedule='{schedule}'"
    with pytest.raises(UnsupportedError, match=text):
        fit(make_module(), make_data(), schedule=schedule)
    with pytest.raises(UnsupportedError, match=text):
        GNNPipeStrategy(schedule=schedule, num_chunks=3).plan(make_module(), make_data())


class Nodes(L.LightningModule):
    """A loss of nodes, for a network that is given no batch vector."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gnn.models.GCN(3, 4, 2, 2)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out: Tensor = self.net(data.x, data.edge_index)
        return out.square().sum()

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.net(data.x, data.edge_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def test_one_graph_may_come_in_validation() -> None:
    """Before any batch of several graphs, in the sanity check."""
    graphs = []
    for size in (6, 7, 9):
        ring = torch.stack([torch.arange(size), (torch.arange(size) + 1) % size])
        graphs.append(Data(x=torch.randn(size, 3), edge_index=torch.cat([ring, ring.flip(0)], 1)))
    loaders = DataLoader(graphs, batch_size=3), DataLoader(graphs, batch_size=1)
    assert fit(Nodes(), *loaders, num_chunks=2).global_step == 1

"""Losses of which micro-batches cannot go back at once are refused, and so is what else cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.batches.early import _fill
from lightning_gnnpipe.chunks import PipelineStats, TraceEvent, phases
from lightning_gnnpipe.chunks.step_trace import RankRecord, merge_stats
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.report import chrome_trace, draw_timeline, timeline_title
from tests.helpers.batches import draw_batch
from tests.helpers.staged import FreshBatches, Staged

BATCHES = [draw_batch((4, 7, 1, 9, 5, 6), seed) for seed in range(2)]
OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


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


def fit(module: L.LightningModule, schedule: str = "1f1b", **options: Any) -> None:
    L.seed_everything(1, verbose=False)
    strategy = GNNPipeStrategy(schedule=schedule, num_chunks=3, **options)
    L.Trainer(devices=1, strategy=strategy, **OPTIONS).fit(module, FreshBatches(BATCHES))


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


@pytest.mark.parametrize("kind", ["root", "contrast", "norm over graphs", "hardest"])
def test_they_are_right_under_fill_drain_and_in_one_micro_batch(kind: str) -> None:
    fit(Joined((kind,)), "fill_drain")
    strategy = GNNPipeStrategy(schedule="1f1b", num_chunks=1)
    trainer = L.Trainer(devices=1, strategy=strategy, **OPTIONS)
    trainer.fit(Joined((kind,)), FreshBatches(BATCHES))


class Manual(Staged):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Iterates(Staged):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


def test_what_cannot_run_again_is_refused_at_setup() -> None:
    with pytest.raises(
        UnsupportedError, match="automatic optimization, since training_step runs again"
    ):
        fit(Manual())
    with pytest.raises(UnsupportedError, match="to take a batch, since training_step runs again"):
        fit(Iterates())


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="'schedule' to be one of fill_drain, 1f1b, interleaved"):
        GNNPipeStrategy(schedule="gpipe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'num_virtual' to be at least 1"):
        GNNPipeStrategy(schedule="interleaved", num_virtual=0)
    with pytest.raises(ConfigError, match="'graph_parallel' to be 1 with schedule='1f1b'"):
        GNNPipeStrategy(schedule="1f1b", graph_parallel=2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_one_graph_is_refused(schedule: str) -> None:
    from lightning_gnnpipe.models import GNN, NodeClassifier
    from tests.promises.test_p5_bytes import graph

    data = graph()
    data.y = torch.randint(0, 3, (data.num_nodes,))
    strategy = GNNPipeStrategy(schedule=schedule, num_chunks=3)
    module = NodeClassifier(GNN(data.num_features, 8, 3, num_layers=3), 3)
    with pytest.raises(UnsupportedError, match=f"batches of graphs where schedule='{schedule}'"):
        L.Trainer(devices=1, strategy=strategy, **OPTIONS).fit(module, FullGraphDataModule(data))
    with pytest.raises(UnsupportedError, match="batches of graphs where schedule="):
        strategy.plan(module, FullGraphDataModule(data))


class Nodes(L.LightningModule):
    """A loss of nodes, for a network that is given no batch vector."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gnn.Sequential(
            "x, edge_index",
            [
                (gnn.GCNConv(3, 4), "x, edge_index -> x"),
                (gnn.GCNConv(4, 2), "x, edge_index -> x"),
            ],
        )

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out: Tensor = self.net(data.x, data.edge_index)
        return out.square().sum()

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.net(data.x, data.edge_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def test_one_graph_may_come_in_validation() -> None:
    """Before any batch of several graphs, in the sanity check."""
    sizes = (6, 7, 9)
    rings = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in sizes]
    both = [torch.cat([ring, ring.flip(0)], dim=1) for ring in rings]
    graphs = [Data(x=torch.randn(n, 3), edge_index=e) for n, e in zip(sizes, both, strict=True)]
    strategy = GNNPipeStrategy(schedule="1f1b", num_chunks=2)
    trainer = L.Trainer(devices=1, strategy=strategy, num_sanity_val_steps=1, **OPTIONS)
    trainer.fit(Nodes(), DataLoader(graphs, batch_size=3), DataLoader(graphs, batch_size=1))
    assert trainer.global_step == 1


def test_more_stages_than_layers_are_refused() -> None:
    strategy = GNNPipeStrategy(
        schedule="interleaved", num_virtual=4, num_chunks=3, start_method="fork"
    )
    trainer = L.Trainer(devices=2, strategy=strategy, **OPTIONS)
    with pytest.raises(Exception, match=r"2 ranks with 4 stages each and 7 layers.*num_virtual=3"):
        trainer.fit(Staged(), FreshBatches(BATCHES))


def test_rows_that_are_out_stand_in_for_those_that_are_not() -> None:
    output = torch.tensor([[9.0], [1.0], [9.0], [2.0], [9.0], [9.0]])
    filled = _fill(output, torch.tensor([3, 1]))
    assert filled.flatten().tolist() == [2, 1, 1, 2, 2, 1]
    assert _fill(output, torch.tensor([], dtype=torch.int64)).abs().sum() == 0
    assert torch.equal(_fill(output, torch.arange(6)), output)


def stats_of(*rows: str, num_virtual: int) -> PipelineStats:
    """Return the figures of rows such as ``0F0 .. 0B0``, slots of 100 us."""
    records = []
    for rank, row in enumerate(rows):
        slots = enumerate(row.split())
        events = [TraceEvent(rank, a, 100.0 * i, 100.0 * (i + 1)) for i, a in slots if a != ".."]
        records.append(RankRecord(events, {}, 0))
    return merge_stats(records, len(rows) * num_virtual, 2, False, 1, num_virtual)


def test_a_step_that_alternates_is_one_phase(tmp_path: Path) -> None:
    stats = stats_of("0F0 0F1 .. 0B0 .. 0B1", ".. 1F0 1B0 1F1 1B1 ..", num_virtual=1)
    assert phases(stats.events) == [(0, 600)]
    assert stats.wait_s == pytest.approx((2e-4, 2e-4))
    assert stats.bubble_frac == pytest.approx(1 / 3)
    assert "2 stages, 2 chunks" in timeline_title(stats) and "33.3%" in timeline_title(stats)
    trace = json.dumps(chrome_trace(stats))
    assert '"forward and backward"' in trace and '"outputs, loss"' not in trace
    draw_timeline(stats.events, timeline_title(stats)).savefig(tmp_path / "alternating.png")


def test_ranks_of_several_stages_have_names_of_their_own() -> None:
    rows = "0F0 2F0 .. .. 2B0 0B0", ".. 1F0 3F0 3B0 1B0 .."
    stats = stats_of(*rows, num_virtual=2)
    assert stats.rank_names() == [["rank 0"], ["rank 1"]]
    assert (stats.num_stages, stats.num_shards, stats.num_virtual) == (4, 1, 2)
    assert "(at best 20.0%)" in timeline_title(stats)
    plain = stats_of("0F0 0B0", "1F0 1B0", num_virtual=1)
    assert plain.rank_names() == [["stage 0"], ["stage 1"]]

"""The forecast: what is counted is exact, and what is timed adds up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

from lightning_gnnpipe import (
    FullGraphDataModule,
    GNNPipeStrategy,
)
from lightning_gnnpipe.errors import ConfigError, GNNPipeError, UnsupportedError
from lightning_gnnpipe.models import GCNII, NodeClassifier
from lightning_gnnpipe.planning import PipelinePlan
from lightning_gnnpipe.types import CrossChunkEdges, RepeatOption, StalenessName
from tests.helpers.cases import slow

NUM_NODES, NUM_FEATURES, WIDTH, NUM_CLASSES = 60, 5, 8, 3


def make() -> tuple[NodeClassifier, Data]:
    torch.manual_seed(0)
    number = torch.arange(240)
    edges = torch.stack([(number * 7 + number // 11) % NUM_NODES, (number * 3 + 1) % NUM_NODES])
    mask = torch.arange(NUM_NODES) % 2 == 0
    data = Data(
        x=torch.randn(NUM_NODES, NUM_FEATURES),
        edge_index=edges,
        y=torch.arange(NUM_NODES) % NUM_CLASSES,
        train_mask=mask,
        val_mask=~mask,
        test_mask=~mask,
    )
    net = GCNII(NUM_FEATURES, WIDTH, NUM_CLASSES, num_layers=6, dropout=0.1)
    return NodeClassifier(net, NUM_CLASSES), data


@pytest.mark.parametrize(
    ("num_stages", "num_shards", "repeat", "edges"),
    [
        slow(2, 1, "auto", "keep"),
        slow(1, 2, "auto", "keep"),
        (2, 2, "auto", "keep"),
        slow(3, 1, True, "keep"),
        (2, 1, False, "keep"),
        (2, 1, True, "keep"),
        (2, 1, "auto", "drop"),
        (1, 2, "auto", "drop"),
    ],
)
def test_counts_are_those_of_a_run(
    num_stages: int, num_shards: int, repeat: RepeatOption, edges: CrossChunkEdges, tmp_path: Path
) -> None:
    module, data = make()
    L.seed_everything(0, verbose=False)  # the plan splits chunks with the seed 0
    strategy = GNNPipeStrategy(
        num_chunks=4,
        graph_parallel=num_shards,
        start_method="fork",
        balance="uniform",
        repeat_encoder=repeat,
        cross_chunk_edges=edges,
    )
    plan = strategy.plan(module, data, num_stages=num_stages)

    class Stats(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            assert isinstance(trainer.strategy, GNNPipeStrategy)
            stats = trainer.strategy.collect_stats()
            if trainer.global_rank == 0:
                counts = stats.bytes_by_kind
                total = sum(counts[kind] for kind in counts.keys() - {"control"})
                (tmp_path / "bytes.txt").write_text(str(total))

    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages * num_shards,
        strategy=strategy,
        max_epochs=2,
        callbacks=[Stats()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, FullGraphDataModule(data))
    assert int((tmp_path / "bytes.txt").read_text()) == plan.step_bytes
    assert plan.layout == (num_stages, num_shards)
    assert plan.layer_names == tuple(f"convs.{i}" for i in range(6))
    assert sum(plan.chunk_rows) == NUM_NODES and len(plan.chunk_rows) == 4
    lost = round(240 * plan.edge_cut_frac) if edges == "drop" else 0
    assert sum(plan.chunk_edges) == 240 - lost
    assert (sum(plan.halo_rows) == 0) == (edges == "drop")
    assert plan.num_edges == 240
    assert sum(stage.num_layers for stage in plan.stages) == 6
    again = 0 if repeat is False else num_stages - 1  # stages compute X_0 as well
    assert sum(stage.num_parameters for stage in plan.stages) == (
        sum(p.numel() for p in module.parameters()) + again * (NUM_FEATURES * WIDTH + WIDTH)
    )


def test_times_add_up() -> None:
    module, data = make()
    before = {name: p.clone() for name, p in module.state_dict().items()}
    strategy = GNNPipeStrategy(num_chunks=4, repeat_encoder=False)
    free = {"link_gbit_per_s": 1e9, "message_us": 1e-3}
    plan = strategy.plan(module, data, num_stages=3, **free)
    compute_s = sum(stage.compute_s for stage in plan.stages)
    assert compute_s + plan.loss_s == pytest.approx(plan.one_device_s)
    assert 0 < plan.loss_s < plan.step_s
    assert plan.one_device_s / 3 < plan.step_s < plan.one_device_s
    late = GNNPipeStrategy(num_chunks=4).plan(module, data, num_stages=3, message_us=1e6)
    assert late.step_s > 2 * 2 + 2 * 1  # two cuts forward and back, two rounds for the outputs
    slow = GNNPipeStrategy(num_chunks=4).plan(module, data, num_stages=3, link_gbit_per_s=1e-4)
    assert slow.step_s > slow.step_bytes / 3 / (1e-4 * 1e9 / 8) / 2
    assert any("hardly faster" in line for line in slow.advice)
    assert any("6 layers" in line for line in plan.advice)
    assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())
    assert "forward" not in module.net.__dict__


def saved_bytes(module: nn.Module, *args: Tensor) -> int:
    """Return the floating-point bytes that a plain forward saves, weights and arguments aside."""
    known = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *args)}
    saved: dict[int, int] = {}
    kept = []  # so that no storage is freed and its address used again

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in known and tensor.is_floating_point():
            saved[place] = tensor.nbytes
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*args)
    return sum(saved.values())


def test_a_plain_trainers_step_is_forecast_from_a_part_of_the_graph() -> None:
    num_nodes, num_edges = 9000, 40000
    torch.manual_seed(0)
    x, edges = torch.randn(num_nodes, NUM_FEATURES), torch.randint(num_nodes, (2, num_edges))
    data = Data(x=x, edge_index=edges, y=torch.arange(num_nodes) % NUM_CLASSES)
    data.train_mask = data.val_mask = data.test_mask = data.y > 0
    net = GCNII(NUM_FEATURES, WIDTH, NUM_CLASSES, num_layers=6, dropout=0.0)
    plan = GNNPipeStrategy(num_chunks=4).plan(NodeClassifier(net, NUM_CLASSES), data)
    assert plan.plain_s is not None and plan.plain_bytes is not None
    assert plan.plain_s > plan.loss_s
    weights = 4 * sum(p.nbytes for p in net.parameters())
    outputs = 2 * num_nodes * NUM_CLASSES * 4
    kept = plan.plain_bytes - weights - outputs - x.nbytes - edges.nbytes
    assert kept == pytest.approx(saved_bytes(net, x, edges), rel=0.05)


def test_a_module_that_runs_on_the_whole_graph_only_is_planned_without_a_plain_trainer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(9000, 1))
            self.net = GCNII(NUM_FEATURES, WIDTH, NUM_CLASSES, num_layers=2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.net(x + self.shift, edge_index)
            return out

    data = Data(x=torch.randn(9000, NUM_FEATURES), edge_index=torch.randint(9000, (2, 20000)))
    data.y = torch.arange(9000) % NUM_CLASSES
    data.train_mask = data.val_mask = data.test_mask = data.y > 0
    module = NodeClassifier(Embedded(), NUM_CLASSES)
    plan = GNNPipeStrategy(num_chunks=1, pipelined_module="net").plan(module, data, num_stages=1)
    assert plan.plain_s is None and plan.plain_bytes is None
    assert "The module does not run on a part of the graph" in caplog.text


def test_stages_take_longer_that_compute_the_encoder_again() -> None:
    module, data = make()
    options: dict[str, Any] = {"num_chunks": 4, "balance": "uniform"}
    plan = GNNPipeStrategy(**options).plan(module, data, num_stages=3)
    assert sum(stage.compute_s for stage in plan.stages) + plan.loss_s > plan.one_device_s
    assert plan.one_device_s == pytest.approx(
        plan.loss_s + sum(one.forward_s + one.backward_s for one in plan.layer_costs)
    )


def test_memory_follows_how_histories_are_kept() -> None:
    """In half precision they take half the bytes, on another device none; nothing else changes."""
    module, data = make()

    def memory(**options: Any) -> int:
        plan = GNNPipeStrategy(num_chunks=4, balance="uniform", **options).plan(module, data)
        return sum(cost.history_bytes for cost in plan.layer_costs)

    plain = memory()
    # Rows, and their gradients.
    assert plain == 6 * 2 * NUM_NODES * WIDTH * 4
    assert memory(history_dtype=torch.bfloat16) == plain // 2
    assert memory(history_device="cpu") == plain
    assert memory(history_device="cpu:0") == 0


def test_no_histories_are_counted_where_edges_between_chunks_are_dropped() -> None:
    module, data = make()

    def memory(edges: CrossChunkEdges) -> int:
        strategy = GNNPipeStrategy(num_chunks=4, balance="uniform", cross_chunk_edges=edges)
        return strategy.plan(module, data, num_stages=1).stages[0].memory_bytes

    histories = 6 * 2 * NUM_NODES * WIDTH * 4
    assert memory("drop") <= memory("keep") - histories  # and fewer activations


def test_memory_follows_how_staleness_is_met() -> None:
    """A snapshot takes a table; outputs are kept where their gradients come."""
    module, data = make()

    def tables(staleness: StalenessName, **options: Any) -> float:
        strategy = GNNPipeStrategy(num_chunks=4, balance="uniform", staleness=staleness, **options)
        costs = strategy.plan(module, data).layer_costs
        return sum(cost.history_bytes for cost in costs) / (6 * NUM_NODES * WIDTH * 4)

    assert tables("drift") == tables("constant") == tables("constant", recompute=True) == 2
    assert tables("gnnpipe") == 3


def test_all_layouts_of_the_devices_are_compared() -> None:
    module, data = make()
    plan = GNNPipeStrategy(num_chunks=4).plan(module, data, num_devices=8, link_gbit_per_s=1e9)
    pairs = [(one.num_stages, one.num_shards) for one in plan.layouts]
    assert pairs == [(1, 8), (2, 4), (4, 2)]  # eight stages need more than six layers
    assert plan.layout == (plan.best.num_stages, plan.best.num_shards)
    assert plan.step_s == plan.best.step_s == min(one.step_s for one in plan.layouts)
    assert sum(stage.num_layers for stage in plan.stages) == 6
    asked = GNNPipeStrategy(num_chunks=4, graph_parallel=2).plan(module, data, num_stages=2)
    assert asked.layout == (2, 2) and len(asked.layouts) == 3


class SharedNorm(nn.Module):
    """A norm with running statistics behind each layer: all of them must be in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(NUM_FEATURES, NUM_FEATURES) for _ in range(4))
        self.norm = nn.BatchNorm1d(NUM_FEATURES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(conv(x, edge_index))
        return x


def test_layers_that_must_stay_together_are_not_cut_apart() -> None:
    _, data = make()
    module = NodeClassifier(SharedNorm(), NUM_CLASSES)
    plan = GNNPipeStrategy(num_chunks=4).plan(module, data, num_devices=2, link_gbit_per_s=1e-4)
    assert [one.options for one in plan.layouts] == ["num_stages=1, graph_parallel=2"]


def test_more_devices_than_layers_and_nodes_are_refused() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    mask = torch.ones(2, dtype=torch.bool)
    data = Data(x=torch.rand(2, 4), edge_index=edges, y=torch.tensor([0, 1]), train_mask=mask)
    module = NodeClassifier(gnn.GCN(4, 4, 2, 2), 2)
    with pytest.raises(ConfigError, match=r"layout of 3 devices.*2 layers that can be separated"):
        GNNPipeStrategy(num_chunks=2).plan(module, data, num_devices=3)


def test_a_limit_of_memory_counts() -> None:
    module, data = make()

    def plan(num_shards: int = 1, **options: Any) -> PipelinePlan:
        strategy = GNNPipeStrategy(num_chunks=4, graph_parallel=num_shards, balance="uniform")
        return strategy.plan(module, data, **options)

    free = plan(num_devices=4).layouts
    least, *_, most = sorted(free, key=lambda one: one.memory_bytes)
    assert least.memory_bytes < most.memory_bytes and all(one.fits for one in free)
    gib = (least.memory_bytes + most.memory_bytes) / 2 / 2**30
    tight = plan(num_devices=4, memory_gib=gib)
    assert [one.fits for one in tight.layouts] == [one.memory_bytes <= gib * 2**30 for one in free]
    assert tight.best.fits and tight.layout != (most.num_stages, most.num_shards)
    asked = plan(most.num_shards, num_stages=most.num_stages, memory_gib=gib)
    assert asked.layout == (most.num_stages, most.num_shards)
    assert any("Another layout" in line for line in asked.advice)
    none = plan(num_devices=4, memory_gib=1e-6)
    assert none.best.memory_bytes == least.memory_bytes
    assert any("No layout fits" in line for line in none.advice)


def test_fewer_bits_are_fewer_bytes_in_the_plan_as_well() -> None:
    module, data = make()

    def layouts(num_chunks: int = 4, **options: Any) -> Any:
        plan = GNNPipeStrategy(num_chunks=num_chunks, balance="uniform", **options)
        return plan.plan(module, data, num_devices=4).layouts

    shards: dict[str, Any] = {"graph_parallel": 2, "halo_codec": "bf16"}
    plain, halo, cut = layouts(), layouts(**shards), layouts(cut_codec="bf16")
    assert halo[0].step_bytes < plain[0].step_bytes and halo[2].step_bytes == plain[2].step_bytes
    assert cut[2].step_bytes < plain[2].step_bytes and cut[0].step_bytes == plain[0].step_bytes
    halo_grads, cut_grads = (
        layouts(**{**shards, "halo_codec": ("fp32", "bf16")}),
        layouts(cut_codec=("fp32", "bf16")),
    )
    assert halo[0].step_bytes < halo_grads[0].step_bytes < plain[0].step_bytes
    assert cut[2].step_bytes < cut_grads[2].step_bytes < plain[2].step_bytes
    one = layouts(num_chunks=1, cut_codec="bf16", **shards)
    for few, many in zip(one, layouts(num_chunks=1), strict=True):
        assert few.step_bytes < many.step_bytes


class Manual(NodeClassifier):
    """Manual optimization asks the Trainer for its optimizers."""

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.optimizers()
        return loss


class Picky(NodeClassifier):
    """Does not take the outputs that are given to time it."""

    def training_step(self, batch: Data, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert loss.item() != pytest.approx(math.log(NUM_CLASSES))
        return loss


@pytest.mark.parametrize("kind", [Manual, Picky])
def test_a_loss_that_cannot_be_timed_is_left_out(
    kind: type[NodeClassifier], caplog: pytest.LogCaptureFixture
) -> None:
    module, data = make()
    plan = GNNPipeStrategy(num_chunks=4).plan(kind(module.net, NUM_CLASSES), data)
    assert plan.loss_s == 0
    assert ": from a plan of the whole training step to a plan without the loss" in caplog.text
    assert plan.step_s > 0


def test_planning_leaves_the_batch_and_the_layers_caches_alone() -> None:
    class Counts(NodeClassifier):
        def training_step(self, batch: Data, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            batch.seen = batch.get("seen", 0) + 1
            return loss

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = gnn.GCNConv(NUM_FEATURES, WIDTH, cached=True)
            self.second = gnn.GCNConv(WIDTH, NUM_CLASSES, cached=True)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = checkpoint(self.first, x, edge_index, use_reentrant=False).relu()
            return self.second(x, edge_index)

    _, data = make()
    net = Checkpointed()
    GNNPipeStrategy(num_chunks=4).plan(Counts(net, NUM_CLASSES), data)
    assert "seen" not in data
    assert net.first._cached_edge_index is None and net.second._cached_edge_index is None


def test_planning_checks_what_training_would() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = gnn.GCNConv(NUM_FEATURES, NUM_CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x - x.mean(dim=0), edge_index)

    _, data = make()
    module = NodeClassifier(Mixes(), NUM_CLASSES)
    with pytest.raises(UnsupportedError, match="the same values"):
        GNNPipeStrategy(num_chunks=4).plan(module, data, num_stages=1)
    GNNPipeStrategy(num_chunks=4, self_check=False).plan(module, data, num_stages=1)
    GNNPipeStrategy(num_chunks=1, pipelined_module="net").plan(module, data, num_stages=1)


def test_edge_features_that_cross_a_cut_are_counted_by_edge() -> None:
    class Edges(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(2, NUM_FEATURES)
            self.convs = nn.ModuleList(
                gnn.GINEConv(nn.Linear(NUM_FEATURES, NUM_FEATURES)) for _ in range(4)
            )

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            edge_attr = self.encoder(edge_attr)
            for conv in self.convs:
                x = conv(x, edge_index, edge_attr)
            return x

        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            return self(batch.x, batch.edge_index, batch.edge_attr).sum()

    _, data = make()
    data.edge_attr = torch.rand(240, 2)
    module = Edges().eval()
    plan = GNNPipeStrategy(num_chunks=4).plan(module, data, num_stages=2)
    rows = 2 * NUM_NODES + NUM_NODES  # forth and back, and the outputs
    weights = 2 * NUM_FEATURES + NUM_FEATURES  # of the encoder, which both stages run
    assert plan.step_bytes == (rows * NUM_FEATURES + 2 * weights) * 4
    strategy = GNNPipeStrategy(num_chunks=4, repeat_encoder=False)
    plan = strategy.plan(module, data, num_stages=2)
    assert plan.step_bytes == (rows + 2 * 240) * NUM_FEATURES * 4
    assert not module.training and not module.convs[0].training


def test_options_of_the_strategy_count() -> None:
    module, data = make()
    kept = GNNPipeStrategy(num_chunks=4, balance=[1, 5]).plan(module, data)
    again = GNNPipeStrategy(num_chunks=4, balance=[1, 5], recompute=True).plan(module, data)
    assert [stage.num_layers for stage in kept.stages] == [1, 5]
    assert again.stages[1].memory_bytes < kept.stages[1].memory_bytes


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({"edge_index": torch.tensor([[0, 99], [1, 2]])}, {}, "node 99"),
        ({}, {"link_gbit_per_s": 0.0}, "'link_gbit_per_s' to be positive"),
        ({}, {"memory_gib": -1.0}, "'memory_gib' to be positive"),
        ({}, {"message_us": 0.0}, "'message_us' to be positive"),
        ({}, {"num_devices": 0}, "'num_devices' to be at least 1"),
        ({}, {"num_devices": 4, "num_stages": 2}, "either 'num_stages' or 'num_devices'"),
        ({}, {"num_stages": 7}, "7 stages and 6 layers"),
    ],
)
def test_bad_input_is_refused(change: Any, options: Any, text: str) -> None:
    module, data = make()
    with pytest.raises(GNNPipeError, match=text):
        GNNPipeStrategy(num_chunks=4).plan(module, data.update(change), **options)


def test_a_data_module_serves_as_well() -> None:
    module, data = make()
    plan = GNNPipeStrategy().plan(module, FullGraphDataModule(data))
    assert len(plan.chunk_rows) == 8 and len(plan.stages) == 2


def test_a_training_step_that_needs_a_trainer_is_refused() -> None:
    class Impatient(NodeClassifier):
        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            self.current = self.trainer.current_epoch
            return super().training_step(batch, batch_idx)

    _, data = make()
    module = Impatient(GCNII(NUM_FEATURES, WIDTH, NUM_CLASSES, num_layers=4), NUM_CLASSES)
    with pytest.raises(ConfigError, match="reach the pipelined module without a Trainer"):
        GNNPipeStrategy().plan(module, data)


def test_the_users_own_error_is_raised_as_it_is() -> None:
    module, data = make()
    data.x = data.x[:, :-1]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        GNNPipeStrategy().plan(module, data)


def test_one_graph_with_a_batch_vector_of_zeros_is_planned() -> None:
    class Vectored(NodeClassifier):
        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            return self.net(batch.x, batch.edge_index, batch=batch.batch).square().mean()

    _, data = make()
    data.batch = torch.zeros(data.num_nodes, dtype=torch.long)
    net = gnn.GCN(NUM_FEATURES, WIDTH, num_layers=4, norm="graph_norm")
    assert len(GNNPipeStrategy(num_chunks=4).plan(Vectored(net, 2), data).chunk_rows) == 4

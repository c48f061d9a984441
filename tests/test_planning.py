"""The forecast: what is counted is exact, and what is timed adds up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.chunks import LayerCost, StepCosts, timing
from lightning_gnnpipe.errors import ConfigError, GNNPipeError, UnsupportedError
from lightning_gnnpipe.models import GCNII, NodeClassifier
from lightning_gnnpipe.planning import PipelinePlan
from lightning_gnnpipe.trainer import engine_host
from lightning_gnnpipe.types import RepeatOption
from tests.helpers.observed import make_trainer
from tests.helpers.record import StatsRecorder
from tests.test_bad_input import SharedNorm
from tests.test_user_errors import Module, graph

NUM_NODES, NUM_FEATURES, WIDTH, NUM_CLASSES = 60, 5, 8, 3
HISTORIES = 6 * 2 * NUM_NODES * WIDTH * 4  # rows, and their gradients


def masked(edge_index: Tensor, num_nodes: int) -> Data:
    y = torch.arange(num_nodes) % NUM_CLASSES
    data = Data(x=torch.randn(num_nodes, NUM_FEATURES), edge_index=edge_index, y=y)
    data.train_mask = data.val_mask = data.test_mask = y > 0
    return data


def make_data() -> Data:
    number = torch.arange(240)
    edges = [(number * 7 + number // 11) % NUM_NODES, (number * 3 + 1) % NUM_NODES]
    torch.manual_seed(0)
    return masked(torch.stack(edges), NUM_NODES)


def make_module(net: nn.Module | None = None, kind: Any = NodeClassifier) -> Any:
    net = net or GCNII(NUM_FEATURES, WIDTH, NUM_CLASSES, num_layers=6, dropout=0.1)
    return kind(net, NUM_CLASSES)


ASKED = {"num_stages", "num_shards", "num_devices", "link_gbit_per_s", "message_us", "memory_gib"}


def plan_of(module: Any = None, data: Any = None, **options: Any) -> PipelinePlan:
    """Plan with four chunks; `options` are those of the strategy and of the plan."""
    asked = {name: options.pop(name) for name in ASKED & options.keys()}
    strategy = GNNPipeStrategy(**{"num_chunks": 4, **options})
    return strategy.plan(module or make_module(), data or make_data(), **asked)


class Around(NodeClassifier):
    """Has layers before and after the pipelined module, and a frozen one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.after = nn.Linear(NUM_CLASSES, NUM_CLASSES)
        self.net.lin_out.requires_grad_(False)

    def forward(self, data: Data) -> Tensor:
        return self.after(self.net(self.before(data.x), data.edge_index))


@pytest.mark.some_cases(3)
@pytest.mark.parametrize(
    ("kind", "num_stages", "num_shards", "repeat"),
    [
        (NodeClassifier, 2, 2, "auto"),
        (NodeClassifier, 3, 1, True),
        (Around, 2, 1, False),
        (Around, 1, 2, False),
        (Around, 2, 2, True),
    ],
)
def test_counts_are_those_of_a_run(
    kind: Any, num_stages: int, num_shards: int, repeat: RepeatOption, tmp_path: Path
) -> None:
    """One stage reads the input, or each that computes the encoder again."""
    module, data, stats = make_module(kind=kind), make_data(), StatsRecorder(tmp_path)
    options = {"graph_parallel": num_shards, "repeat_encoder": repeat}
    trainer = make_trainer(num_stages * num_shards, 4, stats, max_epochs=2, strategy=options)
    plan = trainer.strategy.plan(module, data, num_stages=num_stages)
    trainer.fit(module, FullGraphDataModule(data))
    counts = torch.load(tmp_path / "bytes.pt")[-1]
    assert sum(counts.values()) - counts.get("control", 0) == plan.layout.step_bytes
    assert plan.layout.sizes == (num_stages, num_shards, 4)
    assert plan.layer_names == tuple(f"convs.{i}" for i in range(6))
    assert sum(plan.chunk_rows) == NUM_NODES and len(plan.chunk_rows) == 4
    assert sum(plan.chunk_edges) == plan.num_edges == 240
    assert sum(plan.halo_rows) > 0
    assert sum(stage.num_layers for stage in plan.layout.stages) == 6
    if kind is Around:
        copies = num_shards * (num_stages - 1) + 2 * (num_shards - 1)  # from the one that reads it
        if repeat:
            copies = 2 * (num_stages * num_shards - 1)
        assert counts["input_grad"] == copies * data.x.nbytes
    else:
        again = 0 if repeat is False else num_stages - 1  # stages compute X_0 as well
        assert sum(stage.num_parameters for stage in plan.layout.stages) == (
            sum(p.numel() for p in module.parameters()) + again * (NUM_FEATURES * WIDTH + WIDTH)
        )


def test_times_add_up() -> None:
    module = make_module()
    before = {name: p.clone() for name, p in module.state_dict().items()}
    free = {"link_gbit_per_s": 1e9, "message_us": 1e-3, "repeat_encoder": False}
    plan = plan_of(module, num_stages=3, **free)
    compute_s = sum(stage.compute_s for stage in plan.layout.stages)
    assert compute_s == pytest.approx(sum(cost.compute_s for cost in plan.layer_costs))
    slowest_s = max(stage.compute_s for stage in plan.layout.stages)
    expected = slowest_s * (4 + 3 - 1) / 4 + 4 * timing._TAKEN_S
    assert plan.layout.step_s == pytest.approx(expected, rel=1e-3)
    late = plan_of(module, num_stages=3, message_us=1e6)
    # two cuts forward and back, two rounds for the outputs
    assert late.layout.step_s > 2 * 2 + 2 * 1
    slow = plan_of(module, num_stages=3, link_gbit_per_s=1e-4)
    assert slow.layout.step_s > slow.layout.step_bytes / 3 / (1e-4 * 1e9 / 8) / 2
    assert slow.best.sizes == (1, 1, 1)
    assert any(line.startswith("Fastest: ") for line in slow.advice)
    assert any(line.startswith("Computing a step, ") for line in slow.advice)
    assert tuple(slow.chunk_times) == (4, 3, 6, 12, 24, 48)
    assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())
    assert "forward" not in module.net.__dict__


def test_exact_passes_in_chunks_are_forecast_with_what_runs_again() -> None:
    """On one stage, where all steps are such; a layer waits for others within a pass."""
    plan = plan_of(num_stages=1, exact_in_chunks=True)
    again = sum(4 * one.forward_s + 3 * one.backward_s for one in plan.layer_costs)
    assert plan.layout.step_s == pytest.approx(again)
    assert plan.layouts[0].sizes == (1, 1, 1) and plan.layouts[0].step_s < again / 1.5
    staged = plan_of(num_stages=2, exact_in_chunks=True, link_gbit_per_s=1e9, message_us=1e-3)
    slowest_s = max(stage.compute_s for stage in staged.layout.stages)
    expected = slowest_s * (4 + 2 - 1) / 4 + 4 * timing._TAKEN_S
    assert staged.layout.step_s == pytest.approx(expected, rel=1e-3)


def test_one_device_with_one_chunk_is_shown_first() -> None:
    data, net = make_data(), GCNII(NUM_FEATURES, WIDTH, NUM_CLASSES, num_layers=6, dropout=0.0)
    plan = plan_of(make_module(net), data, num_stages=2)
    one = plan.layouts[0]
    assert one.sizes == (1, 1, 1)
    assert one.step_bytes == 0 and one.bubble_frac == pytest.approx(0, abs=1e-9)
    weights = 4 * sum(p.nbytes for p in net.parameters())
    outputs = 2 * NUM_NODES * NUM_CLASSES * 4
    given = weights + outputs + data.x.nbytes + data.edge_index.nbytes
    assert one.memory_bytes > given  # and activations, no histories
    lines = str(plan).splitlines()
    names = ("one device, 1 chunk", "graph parallel, 2 shards, 1 chunk")
    for name in (*names, "[pipeline, 2 stages, 4 chunks]", "Fastest: "):
        assert sum(name in line for line in lines) == 1


def test_stages_take_longer_that_compute_the_encoder_again() -> None:
    plan = plan_of(balance="uniform", num_stages=3)
    assert sum(stage.compute_s for stage in plan.layout.stages) > sum(
        one.forward_s + one.backward_s for one in plan.layer_costs
    )


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("options", "tables"),  # of which one is rows, and one their gradients
    [
        ({}, 2),
        ({"history_dtype": torch.bfloat16}, 1),
        ({"history_device": "cpu"}, 2),
        ({"history_device": "cpu:0"}, 0),  # another device
        ({"staleness": "constant"}, 2),
        ({"staleness": "constant", "recompute": True}, 2),
        ({"staleness": "gnnpipe"}, 3),  # a snapshot takes a table
    ],
)
def test_memory_follows_how_histories_are_kept(options: dict[str, Any], tables: int) -> None:
    plan = plan_of(balance="uniform", **options)
    assert sum(cost.history_bytes for cost in plan.layer_costs) == tables * HISTORIES // 2


def test_all_layouts_of_the_devices_are_compared() -> None:
    plan = plan_of(num_devices=8, link_gbit_per_s=1e9)
    # eight stages need more than six layers
    assert [one.sizes for one in plan.layouts] == [(1, 1, 1), (1, 8, 1), (2, 4, 4), (4, 2, 4)]
    assert plan.layout.step_s == min(one.step_s for one in plan.layouts)
    assert sum(stage.num_layers for stage in plan.layout.stages) == 6
    asked = plan_of(graph_parallel=2, num_stages=2)
    assert asked.layout.sizes == (2, 2, 4) and len(asked.layouts) == 4
    many = plan_of(graph_parallel=2, num_stages=1)
    assert [one.sizes for one in many.layouts] == [(1, 1, 1), (1, 2, 1), (2, 1, 4), (1, 2, 4)]


@pytest.mark.parametrize(("factor", "is_alone"), [(0.5, True), (1.05, False), (9.0, False)])
def test_one_device_with_all_cores_is_a_row(factor: float, is_alone: bool) -> None:
    plan = plan_of(num_devices=2)
    seconds = zip(plan.layouts, (3.0, 2.0, 1.0), strict=True)
    layouts = tuple(replace(one, step_s=step_s) for one, step_s in seconds)
    plan = replace(plan, layouts=layouts, layout=layouts[-1])
    plan = replace(plan, by_all_cores=factor * layouts[-1].step_s, by_pyg=0.0)
    [row] = [line for line in str(plan).splitlines() if "the same, a thread a core" in line]
    assert row.startswith("* ") == (factor < 1.1) and str(plan).count("\n* ") == 1
    assert f"{plan.by_all_cores:.3f}" in row
    assert ("the machine was busy" in str(plan)) == (factor == 9.0)
    first, second, *_ = plan.advice
    is_close = factor == 1.05
    assert first.startswith("Take " if is_close else "Fastest: ")
    assert ("devices=1" in first) == ("with a thread a core" in first) == (is_alone or is_close)
    assert ("may take as long" in second and "devices=2" in second) == is_close


@pytest.mark.parametrize("factor", [0.5, 1.01, 9.0])
def test_a_plain_trainer_is_a_row(factor: float) -> None:
    plan = plan_of(num_devices=2)
    assert plan.by_pyg > 0
    least = min([one.step_s for one in plan.layouts] + [plan.by_all_cores or math.inf])
    plan = replace(plan, by_pyg=factor * least)
    [row] = [line for line in str(plan).splitlines() if line[2:].startswith("a plain Trainer ")]
    is_taken = row.startswith("* ")
    assert f"{plan.by_pyg:.3f}" in row and str(plan).count("\n* ") == 1
    assert is_taken == ("a plain Trainer" in plan.advice[0])
    assert is_taken if factor < 1 else factor < 9 or not is_taken
    if factor > 1:
        layouts = tuple(replace(one, step_s=one.sizes == (1, 1, 1) or 0.9) for one in plan.layouts)
        near = replace(plan, layouts=layouts, layout=layouts[-1], by_pyg=0.95, by_all_cores=0.0)
        assert near.advice[0].startswith("Take a plain Trainer, 0.950 s per step")
        assert near.best is near.layouts[0]
        assert "devices=2" in near.advice[1] and near.advice[1].count("may take as long") == 1


@pytest.mark.parametrize("options", [{"memory_gib": 8.0}, {"exact_in_chunks": True}])
def test_no_plain_trainer_is_timed_that_would_be_another(options: dict[str, Any]) -> None:
    assert plan_of(**options).by_pyg == 0.0 and "  a plain Trainer" not in str(plan_of(**options))


def test_no_plain_trainer_is_timed_without_its_caches() -> None:
    assert plan_of(make_module(gnn.GCN(4, 4, 2, 3, cached=True)), graph()).by_pyg == 0.0


def test_layers_that_must_stay_together_are_not_cut_apart() -> None:
    module = Module(SharedNorm())
    plan = plan_of(module, graph(), num_devices=2, link_gbit_per_s=1e-4)
    assert [one.sizes for one in plan.layouts] == [(1, 1, 1), (1, 2, 1)]


def test_more_devices_than_layers_and_nodes_are_refused() -> None:
    data, module = masked(torch.tensor([[0, 1], [1, 0]]), 2), make_module(gnn.GCN(5, 4, 2, 3))
    with pytest.raises(ConfigError, match=r"layout of 3 devices.*2 layers that can be separated"):
        plan_of(module, data, num_chunks=2, num_devices=3)


@pytest.mark.slow
def test_a_limit_of_memory_counts() -> None:
    plan = partial(plan_of, make_module(), balance="uniform")
    free = plan(num_devices=4).layouts
    least, *_, most = sorted(free, key=lambda one: one.memory_bytes)
    assert least.memory_bytes < most.memory_bytes and all(one.fits for one in free)
    gib = (least.memory_bytes + most.memory_bytes) / 2 / 2**30
    tight = plan(num_devices=4, memory_gib=gib)
    for before, one in zip(free, tight.layouts, strict=True):
        fitted = before.memory_bytes <= gib * 2**30
        assert one.fits == (one.memory_bytes <= gib * 2**30) and one.fits >= fitted
        assert bool(one.saved) == (not fitted and one.num_shards == 1)
    assert tight.best.fits
    none = plan(num_devices=4, memory_gib=1e-6)
    assert none.best.memory_bytes == min(one.memory_bytes for one in none.layouts)
    assert none.best.memory_bytes <= least.memory_bytes and "(too much)" in str(none)
    for before, one in zip(free, none.layouts, strict=True):  # shards cannot save
        assert bool(one.saved) == (one.num_shards == 1)
        assert one.memory_bytes < before.memory_bytes or one.num_shards > 1
    assert any("No layout fits" in line for line in none.advice)


@pytest.mark.slow
def test_fewer_bits_are_fewer_bytes_in_the_plan_as_well() -> None:
    shards, plan = {"graph_parallel": 2}, partial(plan_of, make_module(), balance="uniform")

    def steps(**options: Any) -> list[int]:
        return [one.step_bytes for one in plan(num_devices=4, **options).layouts[1:]]

    plain, halo, cut = steps(), steps(halo_codec="bf16", **shards), steps(cut_codec="bf16")
    assert halo[0] < plain[0] and halo[2] == plain[2]
    assert cut[2] < plain[2] and cut[0] == plain[0]
    halo_grads = steps(halo_codec=("fp32", "bf16"), **shards)
    cut_grads = steps(cut_codec=("fp32", "bf16"))
    assert halo[0] < halo_grads[0] < plain[0]
    assert cut[2] < cut_grads[2] < plain[2]


def test_planning_leaves_the_batch_and_the_layers_caches_alone() -> None:
    class Counts(NodeClassifier):
        def training_step(self, batch: Data, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            batch.seen = batch.get("seen", 0) + 1
            return loss

    class Checkpointed(gnn.GCN):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = checkpoint(self.convs[0], x, edge_index, use_reentrant=False).relu()
            return self.convs[1](x, edge_index)

    data, net = make_data(), Checkpointed(NUM_FEATURES, WIDTH, 2, NUM_CLASSES, cached=True)
    plan_of(make_module(net, Counts), data)
    assert "seen" not in data
    assert all(conv._cached_edge_index is None for conv in net.convs)


def test_planning_times_with_the_threads_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([gnn.GCNConv(4, 4), gnn.GCNConv(4, 4)])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for conv in self.convs:
                x = conv(x, edge_index)
            return x

    net, seen = Watched(), set[int]()
    net.convs[1].register_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        GNNPipeStrategy(num_chunks=2).plan(Module(net), [graph()], num_stages=2)
        assert seen == {2}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_planning_checks_what_training_would() -> None:
    class Mixes(gnn.GCN):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.convs[0](x, edge_index)
            return self.convs[1](x.renorm(2, 1, 0.1), edge_index)  # bounds each column

    module = make_module(Mixes(NUM_FEATURES, WIDTH, 2, NUM_CLASSES))
    with pytest.raises(UnsupportedError, match="the same values"):
        plan_of(module, num_stages=1)
    plan_of(module, self_check=False, num_stages=1)
    plan_of(module, num_chunks=1, pipelined_module="net", num_stages=1)


def test_edge_features_that_cross_a_cut_are_counted_by_edge() -> None:
    class Edges(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, width = nn.Linear(2, NUM_FEATURES), NUM_FEATURES
            self.convs = nn.ModuleList(gnn.GINEConv(nn.Linear(width, width)) for _ in range(4))

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            edge_attr = self.encoder(edge_attr)
            for conv in self.convs:
                x = conv(x, edge_index, edge_attr)
            return x

        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            return self(batch.x, batch.edge_index, batch.edge_attr).sum()

    data, module = make_data(), Edges().eval()
    data.edge_attr = torch.rand(240, 2)
    plan = plan_of(module, data, num_stages=2)
    rows = 2 * NUM_NODES + NUM_NODES  # forth and back, and the outputs
    own, tied = (  # with each gradient goes a number: whether it is there
        sum(p.numel() + 1 for p in one.parameters()) for one in (module.convs, module.encoder)
    )
    both = rows * NUM_FEATURES + own + 2 * tied  # both run the encoder
    assert plan.layout.step_bytes == both * 4
    plan = plan_of(module, data, repeat_encoder=False, num_stages=2)
    assert plan.layout.step_bytes == ((rows + 2 * 240) * NUM_FEATURES + own + tied) * 4
    assert not module.training and not module.convs[0].training


def test_options_of_the_strategy_count() -> None:
    kept, again = plan_of(balance=[1, 5]), plan_of(balance=[1, 5], recompute=True)
    assert [stage.num_layers for stage in kept.layout.stages] == [1, 5]
    assert again.layout.stages[1].memory_bytes < kept.layout.stages[1].memory_bytes


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({"edge_index": torch.tensor([[0, 99], [1, 2]])}, {}, "node 99"),
        ({}, {"link_gbit_per_s": 0.0}, "'link_gbit_per_s' to be positive"),
        ({}, {"memory_gib": -1.0}, "'memory_gib' to be positive"),
        ({}, {"message_us": 0.0}, "'message_us' to be positive"),
        ({}, {"num_devices": 0}, "'num_devices' to be positive"),
        ({}, {"num_devices": 4, "num_stages": 2}, "either 'num_stages' or 'num_devices'"),
        ({}, {"num_devices": 4, "num_shards": 2}, "either 'num_shards' or 'num_devices'"),
        ({}, {"num_stages": 7}, "7 stages and 6 layers"),
    ],
)
def test_bad_input_is_refused(change: Any, options: Any, text: str) -> None:
    with pytest.raises(GNNPipeError, match=text):
        plan_of(None, make_data().update(change), **options)


class Stream(IterableDataset[Data]):
    def __init__(self, data: Data) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Data]:
        yield self.data


@pytest.mark.parametrize(
    "kind",
    [
        FullGraphDataModule,
        lambda data: DataLoader([data]),
        lambda data: torch.utils.data.DataLoader([data], batch_size=None),
        Stream,  # which Lightning takes as a loader
    ],
)
def test_data_modules_and_loaders_serve_as_well(kind: Any) -> None:
    plan = plan_of(None, kind(make_data()))
    assert len(plan.chunk_rows) == 4 and len(plan.layout.stages) == 2


@pytest.mark.parametrize(("share", "chosen"), [(0.01, 8), (1 / 8, 2), (0.0, 16)])
def test_plan_and_fit_choose_the_same_number_of_chunks(
    share: float,
    chosen: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of 2 stages, where each chunk adds a `share` of what a layer takes in 8 chunks."""

    def with_overhead(self: StepCosts, other: StepCosts) -> StepCosts:
        cost = LayerCost(0.1, 0.1, 8, chunk_s=0.2 * share)
        return StepCosts((cost,) * len(self.layers), {}, 8)

    monkeypatch.setattr(StepCosts, "with_overhead", with_overhead)
    data, module = make_data(), make_module(gnn.GCN(NUM_FEATURES, WIDTH, 6, NUM_CLASSES))
    plan = plan_of(module, data, num_chunks="auto", num_stages=2)
    sizes = [one.sizes for one in plan.layouts]
    assert plan.layout.num_chunks == len(plan.chunk_rows) == chosen
    assert sizes == [(1, 1, 1), (1, 2, 1), (2, 1, chosen)]
    options = {"balance": "measured", "num_chunks": "auto"}
    monkeypatch.setattr(engine_host, "rank_zero_info", print)
    trainer = make_trainer(2, 8, max_epochs=1, strategy=options)
    trainer.fit(module, FullGraphDataModule(data))
    assert f"Pipeline: 2 stages of 3 + 3 layers, {chosen} chunks." in capfd.readouterr().out
    assert plan_of(module, data, num_chunks="auto", num_stages=1).layout.num_chunks == 1
    uniform = plan_of(module, data, num_chunks="auto", balance="uniform", num_stages=2)
    assert uniform.layout.num_chunks == 8  # as in training, where nothing is measured


def test_the_least_memory_is_shown_where_nothing_fits() -> None:
    tight = {"memory_gib": 1e-6, "num_stages": 2}
    none, staged = plan_of(**tight), plan_of(weights="staged", **tight)
    least = f"Use more devices: {none.best.memory_bytes / 2**20:,.0f} MiB, with Trainer("
    assert least in str(none) and "exact_in_chunks=True" in none.layout.options
    assert "weights='staged'" in str(none) and "weights=" not in str(staged)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_row_of_one_device_has_its_memory(recompute: bool) -> None:
    """With one chunk all activations exist at once, also when they are computed again."""
    plan = plan_of(recompute=recompute, num_stages=2, balance="uniform")
    saved = sum(cost.saved_bytes for cost in plan.layer_costs)
    weights = 4 * 4 * sum(p.numel() for p in make_module().parameters())
    assert plan.layouts[0].memory_bytes >= saved + weights
    [row] = [line for line in str(plan).splitlines() if "one device, 1 chunk" in line]
    assert float(row.split()[-1]) > 0


def test_a_training_step_that_needs_a_trainer_is_refused() -> None:
    class Impatient(NodeClassifier):
        def training_step(self, batch: Data, batch_idx: int) -> Any:
            return self.trainer.current_epoch

    with pytest.raises(ConfigError, match="reach the pipelined module without a Trainer"):
        plan_of(make_module(kind=Impatient))


def test_a_path_is_no_graph_to_plan_for() -> None:
    with pytest.raises(ConfigError, match=r"got 'folder'\).*FullGraphDataModule\('folder'\)"):
        GNNPipeStrategy().plan(make_module(), "folder")


def test_what_is_no_lightning_module_is_named() -> None:
    GNNPipeStrategy().plan(torch.compile(make_module()), make_data())
    for given in ((gnn.GCN(5, 4, 2, 3), graph()), (graph(), make_module())):
        with pytest.raises(ConfigError, match=r"a LightningModule.*got (GCN|Data)\b.*plan\(module"):
            GNNPipeStrategy().plan(*given)


def test_the_users_own_error_is_raised_as_it_is() -> None:
    data = make_data()
    data.x = data.x[:, :-1]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plan_of(None, data)


def test_one_graph_with_a_batch_vector_of_zeros_is_planned() -> None:
    class Vectored(NodeClassifier):
        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            return self.net(batch.x, batch.edge_index, batch=batch.batch).square().mean()

    data = make_data()
    data.batch = torch.zeros(data.num_nodes, dtype=torch.long)
    net = gnn.GCN(NUM_FEATURES, WIDTH, num_layers=4, norm="graph_norm")
    assert len(plan_of(make_module(net, Vectored), data).chunk_rows) == 4

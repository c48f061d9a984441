"""What is said at the start of a fit: one line, and warnings where stages do not pay."""

from __future__ import annotations

import platform
import re
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric import nn as gnn

from lightning_gnnpipe.chunks import LayerCost, StepCosts, timing, uses_glibc_malloc
from lightning_gnnpipe.engine import passes
from lightning_gnnpipe.models import GNN, NodeClassifier
from lightning_gnnpipe.planning import forecast
from lightning_gnnpipe.planning.closed_forms import MESSAGE_S
from lightning_gnnpipe.stages import Layers
from lightning_gnnpipe.trainer import engine_host
from tests.helpers.batches import GraphModule, draw_batch
from tests.helpers.observed import (
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_LAYERS,
    WIDTH,
    fit,
    make_module,
    make_trainer,
)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("bars", [[], [TQDMProgressBar()]])
def test_one_line_says_the_layout(
    num_stages: int,
    bars: list[L.Callback],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With and without Lightning's summary."""
    monkeypatch.setattr(engine_host, "rank_zero_info", lambda text: print(f"Logged: {text}"))
    shows = bool(bars)
    fit(num_stages, *bars, enable_model_summary=shows, enable_progress_bar=shows)
    shown = capfd.readouterr().out
    assert ("Logged: " in shown) != shows
    stages = "1 stage of 4" if num_stages == 1 else "2 stages of 2 + 2"
    assert shown.count(f"Pipeline: {stages} layers, 4 chunks.") == shown.count("Pipeline: ") == 1
    assert ("num_chunks=1 is exact" in shown) == (num_stages == 1)
    assert "Expected" not in shown  # with balance="uniform" nothing is measured
    before, _ = shown.split("Pipeline: ")
    assert before.count("Tracing the network and checking it ...") == 1 and "Timing" not in shown


def measuring(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], chunk_s: float, alone_s: float = 0.0
) -> None:
    """Let layers take `seconds` in 4 chunks, each one more chunk `chunk_s`, all cores `alone_s`."""

    def with_overhead(self: StepCosts, other: StepCosts) -> StepCosts:
        found = (LayerCost(one, 0.0, 0, pushed=(WIDTH,), chunk_s=chunk_s) for one in seconds)
        return StepCosts(tuple(found), {}, 4, by_all_cores=(LayerCost(alone_s, 0.0, 0),))

    monkeypatch.setattr(StepCosts, "with_overhead", with_overhead)
    monkeypatch.setattr(engine_host.log, "warning", lambda text, *args: print(text % args))
    monkeypatch.setattr(engine_host, "rank_zero_info", print)


@pytest.mark.parametrize(
    ("seconds", "chunk_s", "told", "warned"),
    [  # 2 stages take (4 + 1) / 4 of the slower one, and 10 messages
        (
            [60e-3] * 4,
            0.0,
            r"chunks\. Expected seconds for a step:\n"
            r"0\.164  in these stages *\n"
            r"0\.240  on one device with one chunk, 1 thread \(it could use 5\)\n"
            r"0\.14\d  by graph parallelism *\n"
            r"Layers were timed alone: on CPUs steps take 0\.6 to 1\.4 times as long, "
            r"by graph parallelism up to twice\.\n",
            "",
        ),
        (
            [1.0] * 4,
            0.2,
            r"2\.51\d  in these stages *\n1\.600  on one device",
            "are not the fastest",
        ),
        (
            [9.0, 1.0, 1.0, 1.0],
            0.0,
            r"11\.26\d  in these stages *\n12\.000  on",
            "wait for 'convs.0'",
        ),
    ],
)
def test_what_a_step_takes_is_said_beside_other_layouts(
    seconds: list[float],
    chunk_s: float,
    told: str,
    warned: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    measuring(monkeypatch, seconds, chunk_s)
    monkeypatch.setattr(timing, "num_cores", lambda: 5)
    monkeypatch.setattr(engine_host, "num_cores", lambda: 5)
    monkeypatch.setattr(forecast, "num_cores", lambda: 5)
    options = {"balance": "measured"}
    fit(2, strategy=options, max_epochs=1)
    shown = capfd.readouterr().out
    [line] = [one for one in shown.splitlines() if "Pipeline: " in one]
    places = [shown.index(one) for one in ("Tracing the", "Timing its layers ...", line)]
    assert places == sorted(places)
    assert re.search(told, shown), shown
    assert warned in shown and ("The stages" in shown) == bool(warned)
    assert ("75 % of a step's cost" in shown) == ("wait" in warned)
    assert ("strategy=GNNPipeStrategy(num_chunks=1" in shown) == bool(warned)


@pytest.mark.parametrize(("alone_s", "is_warned"), [(0.18, False), (0.12, True)])
def test_one_device_with_all_cores_is_compared_as_well(
    alone_s: float,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    measuring(monkeypatch, [60e-3] * 4, 0.0, alone_s)
    monkeypatch.setattr(timing, "num_cores", lambda: 5)
    monkeypatch.setattr(engine_host, "num_cores", lambda: 5)
    monkeypatch.setattr(forecast, "num_cores", lambda: 5)
    fit(2, strategy={"balance": "measured"}, max_epochs=1)
    shown = capfd.readouterr().out
    rows = [line.strip() for line in shown.splitlines()]
    one = rows.index(f"{alone_s:.3f}  on one device with one chunk, 5 threads")
    assert rows[one - 1].endswith("on one device with one chunk, 1 thread")
    assert rows[one + 1].startswith("0.14")
    advice = "and 0.120 s with Trainer(devices=1, strategy=GNNPipeStrategy(num_chunks=1)), with 5"
    assert (advice in shown) == ("not the fastest" in shown) == is_warned
    alone = "One device may be as fast: Trainer(devices=1, strategy=GNNPipeStrategy(num_chunks=1))."
    assert (alone in shown) != is_warned


@pytest.mark.parametrize("threads", [5, None])
def test_stages_that_take_turns_have_the_time_of_all_cores(
    threads: int | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measuring(monkeypatch, [60e-3] * 4, 0.0, 0.12)
    monkeypatch.setattr(engine_host, "threads_of_stage", lambda _: threads)
    fit(2, num_chunks=1, strategy={"balance": "measured"}, max_epochs=1)
    shown = capfd.readouterr().out
    assert ("0.120  in these stages" in shown) == (threads is not None)
    assert "1 chunk. Expected seconds for a step:\n0." in shown


def test_processes_that_share_cores_take_longer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two on one core take what all layers do."""
    measuring(monkeypatch, [0.5] * 4, 0.0)
    monkeypatch.setattr(timing, "num_cores", lambda: 1)
    monkeypatch.setattr(engine_host, "num_cores", lambda: 1)
    monkeypatch.setattr(forecast, "num_cores", lambda: 1)
    fit(2, strategy={"balance": "measured"}, max_epochs=1)
    shown = capfd.readouterr().out
    assert re.search(r"2\.01\d  in these stages *\n2\.000  on one device .*\n.*by graph", shown)
    assert "(num_chunks=1)).\n2 processes share 1 core, which takes longer still." in shown


def test_graph_parallelism_sums_for_each_norm(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """BatchNorm takes three sums of two messages, LayerNorm none."""
    measuring(monkeypatch, [6e-3] * 4, 0.0)

    def forecast_s(norm: type[torch.nn.Module]) -> float:
        module = make_module()
        module.net.norms = torch.nn.ModuleList(norm(WIDTH) for _ in range(num_norms))
        fit(2, strategy={"balance": "measured"}, max_epochs=1, module=module)
        found = re.search(r"([\d.]+)  by graph parallelism", capfd.readouterr().out)
        assert found is not None
        return float(found[1])

    num_norms = NUM_LAYERS - 1
    more_s = forecast_s(torch.nn.BatchNorm1d) - forecast_s(torch.nn.LayerNorm)
    assert more_s == pytest.approx(num_norms * 6 * MESSAGE_S, abs=2e-3)


class OfGraphs(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = gnn.models.GCN(NUM_FEATURES, WIDTH, 4, NUM_CLASSES).double()

    def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
        return self.net(data.x, data.edge_index, batch=data.batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Pooled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(gnn.GCNConv(NUM_FEATURES, NUM_FEATURES) for _ in range(4))
        self.norm = torch.nn.BatchNorm1d(NUM_FEATURES)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.norm(gnn.global_mean_pool(x, batch, size))


class OfPooled(OfGraphs):
    def __init__(self) -> None:
        super().__init__()
        self.net = Pooled().double()

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        return self.net(data.x, data.edge_index, data.batch, data.num_graphs).square().mean()

    def validation_step(self, data: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(data, batch_idx), batch_size=1)


def test_a_validation_of_few_graphs_may_come_first() -> None:
    """BatchNorm over the graphs of a micro-batch of one graph has no statistics."""
    trainer = make_trainer(
        2, 4, max_epochs=1, strategy={"balance": "measured"}, num_sanity_val_steps=1
    )
    loaders = [
        DataLoader([draw_batch(sizes)], batch_size=None)
        for sizes in ((4, 7, 5, 9, 5, 6, 3, 8), (4, 7, 5, 6))
    ]
    trainer.fit(OfPooled(), *loaders)
    assert trainer.callback_metrics["loss"].isfinite()


def test_micro_batches_that_cost_more_than_they_save_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    measuring(monkeypatch, [0.4] * 4, 0.1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(timing, "num_cores", lambda: 6)
    monkeypatch.setattr(engine_host, "num_cores", lambda: 6)
    monkeypatch.setattr(forecast, "num_cores", lambda: 6)
    trainer = make_trainer(2, 4, max_epochs=1, strategy={"balance": "measured"})
    loader = DataLoader([draw_batch((4, 7, 5, 9, 5, 6, 3, 8))], batch_size=None)
    trainer.fit(OfGraphs(), loader)
    shown = capfd.readouterr().out
    assert re.search(
        r"Pipeline: 2 stages of 2 \+ 2 layers, 4 micro-batches\. "
        r"Expected seconds for a step:\n1\.01\d  in these stages *\n"
        r"0\.400  on one device with one chunk, 3 threads \(it could use 6\)\n",
        shown,
    )
    assert "Trainer(devices=1, strategy=GNNPipeStrategy(num_chunks=1))" in shown


@pytest.mark.parametrize("sanity_steps", [0, 2])
def test_layers_are_timed_as_they_train(
    sanity_steps: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where a validation comes first, in which dropout does nothing."""
    measured = passes.measure_costs

    def measure(module: Any, layers: Layers, *args: Any, **options: Any) -> StepCosts:
        drops = [
            node.kwargs["training"] if node.op == "call_function" else module.training
            for one in layers.segments
            for node in one.module.graph.nodes
            if "dropout" in str(node.target)
        ]
        print("All drop:", bool(drops) and all(drops))
        return measured(module, layers, *args, **options)

    monkeypatch.setattr(passes, "measure_costs", measure)
    options = {"balance": "measured"}
    fit(2, strategy=options, max_epochs=1, num_sanity_val_steps=sanity_steps)
    assert "All drop: True" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("conv", "num_chunks", "options", "is_glibc", "is_said"),
    [
        ("gcn", 4, {}, True, False),  # a chunk has 10 nodes, of 32 bytes a layer
        ("gat", 4, {}, True, True),  # and 30 edges, with a message each
        ("gcn", 1, {}, True, True),
        ("gcn", 1, {}, False, False),
        ("gat", 4, {"exact_in_chunks": True}, True, False),
        ("gat", 4, {"memory_gib": 8.0}, True, False),
        ("wide", 1, {}, True, False),  # features are made once
    ],
)
def test_tensors_that_the_system_clears_for_each_use_are_said(
    conv: str,
    num_chunks: int,
    options: dict[str, Any],
    is_glibc: bool,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engine_host, "LARGE_BYTES", 640)
    monkeypatch.setattr(engine_host, "uses_glibc_malloc", lambda: is_glibc)
    monkeypatch.setattr(engine_host, "rank_zero_info", print)
    width, conv = (1, "gcn") if conv == "wide" else (WIDTH, conv)
    net = GNN(NUM_FEATURES, width, NUM_CLASSES, NUM_LAYERS, conv=conv)
    module = NodeClassifier(net, NUM_CLASSES)
    fit(1, num_chunks=num_chunks, module=module, max_epochs=1, strategy=options)
    assert capfd.readouterr().out.count("LD_PRELOAD=libtcmalloc_minimal.so.4") == is_said


@pytest.mark.parametrize("options", [{}, {"exact_in_chunks": True}, {"memory_gib": 8.0}])
@pytest.mark.parametrize("is_glibc", [False, True])
def test_what_saves_memory_is_told_of_another_malloc(
    options: dict[str, Any],
    is_glibc: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_host, "uses_glibc_malloc", lambda: is_glibc)
    fit(1, max_epochs=1, strategy=options)
    assert ("through glibc's malloc" in caplog.text) == (bool(options) and not is_glibc)


def test_batches_without_edges_in_the_call_are_told_as_well(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A network that finds neighbours by itself takes nodes and their graphs alone."""
    monkeypatch.setattr(engine_host, "LARGE_BYTES", 0)
    monkeypatch.setattr(engine_host, "uses_glibc_malloc", lambda: True)
    monkeypatch.setattr(engine_host, "rank_zero_info", print)
    trainer = make_trainer(1, 2, max_epochs=1)
    trainer.fit(GraphModule("vig max_relative"), DataLoader([draw_batch([3, 4])], batch_size=None))
    assert capfd.readouterr().out.count("LD_PRELOAD=libtcmalloc_minimal.so.4") == 1


def test_whose_malloc_it_is_is_known() -> None:
    assert uses_glibc_malloc() == (platform.libc_ver()[0] == "glibc")

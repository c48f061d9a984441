"""`memory_gib`: the cheapest that fits is chosen, what is given is kept, the rest is refused."""

from __future__ import annotations

import gc
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.chunks import LayerCost, StepCosts, choose_setting, settings_of, timing
from lightning_gnnpipe.chunks.memory import _reads, edge_bytes, predict_peaks
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import plan_from_assignment
from lightning_gnnpipe.models import GCNII, GNN, NodeClassifier
from lightning_gnnpipe.options import RunOptions, StrategyOptions
from lightning_gnnpipe.stages import cut_module, split_layers
from lightning_gnnpipe.staleness import HistoryOptions
from lightning_gnnpipe.trainer import engine_host
from tests.helpers.engines import one_process_engine
from tests.helpers.observed import make_trainer

NUM_NODES, WIDTH, NUM_LAYERS = 2000, 32, 12
ALL = {"recompute": True, "history_dtype": "bfloat16", "exact_in_chunks": True}


def savings(**given: Any) -> list[dict[str, Any]]:
    options = StrategyOptions(**given)
    return [one.saved_beside(options) for one in options.savings()]


def test_what_saves_memory_is_tried_by_its_price() -> None:
    names = [tuple(one) for one in savings()]
    once, dtype, exact = ALL
    assert names == [(), (once,), (dtype,), (once, dtype), *((*n, exact) for n in names[:4])]
    assert savings()[-1] == ALL


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"recompute": True, "history_dtype": "float32"}, {"exact_in_chunks"}),
        ({"exact_in_chunks": True, "history_dtype": torch.float16}, {"recompute"}),
        ({"graph_parallel": 2}, {"recompute", "history_dtype"}),
        ({"cuda_graphs": True}, {"history_dtype", "exact_in_chunks"}),
    ],
)
def test_what_is_given_is_kept(given: dict[str, Any], left: set[str]) -> None:
    assert {name for one in savings(**given) for name in one} == left
    for one in StrategyOptions(**given).savings():
        assert all(getattr(one, name) == value for name, value in given.items())


def test_the_first_that_fits_is_chosen_else_the_smallest() -> None:
    asked = []

    def predict(setting: Any) -> list[int]:
        options, num_chunks = setting
        asked.append(num_chunks)
        return [1, 100 // num_chunks - 20 * options.recompute]

    plain, again, *_ = StrategyOptions().savings()
    settings = [(one, number) for one in (plain, again) for number in (2, 4, 5)]
    assert choose_setting(settings, predict, 50) == ((plain, 2), 50) and asked == [2]
    assert choose_setting(settings, predict, 20) == ((plain, 5), 20)
    assert choose_setting(settings, predict, 5) == ((again, 4), 5)
    assert choose_setting(settings, predict, 0.5) == ((again, 5), 1)


def test_chunks_come_by_their_time_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "times", lambda *_: {2: 3.0, 4: 1.0, 8: 1.02, 16: 0.99})
    costs = StepCosts((LayerCost(1.0, 1.0, 8),) * 4, {})

    def numbers(**given: Any) -> list[int]:
        run = RunOptions(StrategyOptions(memory_gib=1.0, **given), 2)
        found = settings_of(run, (), costs)
        assert [one for _, one in found[:4]] == [one for _, one in found[4:8]] or len(found) == 8
        return [one for options, one in found if not options.saved_beside(run.given)]

    assert numbers() == [4, 16, 8, 2]
    assert numbers(recompute=True) == [4, 16, 8, 2]
    assert numbers(partition=torch.arange(40) % 3) == [3]


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"exact_in_chunks": True}])
@pytest.mark.parametrize("num_chunks", [1, 4])
def test_a_peak_has_what_lives_while_a_layer_runs(options: dict[str, Any], num_chunks: int) -> None:
    """Of all nodes, or of the largest chunk, which has 1.5 times the mean's work."""
    net, (x, edges) = GNN(4, 4, 4, 4, 0.0), (torch.randn(8, 4), torch.randint(8, (2, 16)))
    call = flatten_call(net, (x, edges), {})
    stages = split_layers(cut_module(net, call, classify(call)), (4,))

    def peak(running: int) -> int:
        layers = (LayerCost(1.0, 1.0, 10, running_bytes=running),) * 4
        costs = StepCosts(layers, {}, num_chunks, largest=1.5 if num_chunks > 1 else 1.0)
        setting = StrategyOptions(num_chunks=num_chunks, **options), num_chunks
        return predict_peaks([0], stages, costs, setting)[0]

    is_chunk = num_chunks > 1 and "exact_in_chunks" in options
    expected = 40_000 * (1.5 / num_chunks if is_chunk else 1)
    assert peak(50_000) - peak(10_000) == pytest.approx(1.05 * expected, abs=2)


def test_a_value_that_later_layers_read_lives_until_the_last() -> None:
    """GCNII's X_0, and the embeddings between layers: before a layer, numbers of tensors."""
    net, (x, edges) = GCNII(4, 4, 4, 3), (torch.randn(8, 4), torch.randint(8, (2, 16)))
    call = flatten_call(net, (x, edges), {})
    [stage] = split_layers(cut_module(net, call, classify(call)), (3,))
    kept, ahead = _reads(stage, lambda names: len(list(names)))
    assert kept == [0, 2 + 1, 3]  # in backward the gradient of X_0 waits
    assert ahead == [0, 2, 2]


def make_inputs() -> tuple[NodeClassifier, FullGraphDataModule]:
    """Return a network whose activations outweigh its weights and edges."""
    L.seed_everything(0, verbose=False)
    edges = torch.randint(0, NUM_NODES, (2, 2 * NUM_NODES))
    data = Data(x=torch.randn(NUM_NODES, 8), edge_index=edges, y=torch.arange(NUM_NODES) % 3)
    return NodeClassifier(GNN(8, WIDTH, 3, NUM_LAYERS, 0.0), 3), FullGraphDataModule(data)


def plan(**options: Any) -> Any:
    return GNNPipeStrategy(**options).plan(*make_inputs(), num_stages=1).layout


def fit(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    free = {"num_chunks": "auto", "balance": "measured", **options}
    trainer = make_trainer(1, 4, *callbacks, strategy=free, max_epochs=2)
    trainer.fit(*make_inputs())
    return trainer


def test_a_run_takes_what_fits_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_host, "rank_zero_info", print)
    most, least = plan(num_chunks=4).memory_bytes, plan(num_chunks=4, **ALL).memory_bytes
    assert least < 0.8 * most
    options: dict[str, Any] = {"num_chunks": 4, "memory_gib": (most + least) / 2**31}
    planned = plan(**options)
    saved = ", ".join(f"{name}={value!r}" for name, value in planned.saved.items())
    assert saved and planned.fits and saved in planned.options
    strategy = fit(**options).strategy
    lines = capfd.readouterr().out.splitlines()
    [line] = [one for one in lines if "Memory: " in one]
    assert line.endswith(f" of {options['memory_gib']:g} GiB with {saved}.")
    assert any("Pipeline: " in one for one in lines[: lines.index(line)])
    assert isinstance(strategy, GNNPipeStrategy)
    assert strategy.options == StrategyOptions(  # the next run chooses again
        **options, balance="measured", start_method="fork"
    )
    fit(memory_gib=1.0)
    assert re.search(r" 1 chunk\.[^$]*\nMemory: \S+ of 1 GiB\.", capfd.readouterr().out)


def test_exact_steps_that_are_chosen_keep_no_histories() -> None:
    least = plan(num_chunks=4, **ALL).memory_bytes
    found = []

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            engine = trainer.strategy.engine  # type: ignore[attr-defined]
            found.append((engine.options.given.exact_in_chunks, engine.graphs.num_bytes))

    fit(Look(), num_chunks=4, memory_gib=1.01 * least / 2**30)
    [(is_exact, num_bytes)] = found
    assert is_exact and num_bytes < least / 2


@pytest.mark.parametrize("conv", [gnn.GCNConv, gnn.SAGEConv, gnn.GATConv])
@pytest.mark.parametrize(
    ("num_chunks", "in_chunks", "in_files"),
    [(1, False, False), (4, False, False), (4, True, False), (4, True, True)],
)
def test_an_edge_takes_no_more_bytes_than_predicted(
    conv: Any, num_chunks: int, in_chunks: bool, in_files: bool, tmp_path: Path
) -> None:
    num_nodes, num_edges = 40, 40_000
    edges, x = torch.randint(num_nodes, (2, num_edges)), torch.randn(num_nodes, 4)
    convs = [(conv(4, 4), "x, edge_index -> x") for _ in range(2)]
    net, parts = gnn.Sequential("x, edge_index", convs), torch.arange(num_nodes) % num_chunks
    options: dict[str, Any] = {"exact_in_chunks": in_chunks, "history_dtype": torch.bfloat16}
    options |= {"table_folder": tmp_path} if in_files else {}
    call = flatten_call(net, (x, edges), {})
    inputs, plan = classify(call), plan_from_assignment(edges, num_nodes, parts)
    layers = cut_module(net, call, inputs)
    kept = timing.measure_layers(net, layers, plan, call, inputs, HistoryOptions()).edges
    before = storages()
    engine = one_process_engine(net, partition=parts, num_stages=2, self_check=False, **options)
    for number in range(3):
        engine.set_step(step_index=number)
        engine.forward((), {"x": x, "edge_index": edges}).sum().backward()
    made = [size for place, size in storages().items() if place not in before]
    found = sum(size for size in made if size >= num_edges / num_chunks) / num_edges
    costs = StepCosts((), {}, edges=kept)
    expected = edge_bytes(StrategyOptions(**options), costs, num_chunks > 1)
    assert 0.85 * expected <= found <= expected


def storages() -> dict[int, int]:
    """Return the bytes of all tensors in memory, by place, without those in files."""
    gc.collect()
    kinds = torch.Tensor, nn.Parameter  # others have no memory of their own
    found = [one for one in gc.get_objects() if type(one) in kinds]
    places = (one.untyped_storage() for one in found if one.layout is torch.strided)
    return {one.data_ptr(): one.nbytes() for one in places if one.filename is None}


def test_a_refusal_counts_weights_once_for_each_number_of_stages() -> None:
    class Counted(GNN):
        num_counts = 0

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            self.num_counts += 1
            return super().named_parameters(*args, **kwargs)

    _, data = make_inputs()
    net = Counted(8, WIDTH, 3, NUM_LAYERS, 0.0)
    trainer = make_trainer(1, 4, strategy={"num_chunks": "auto", "memory_gib": 1e-6})
    with pytest.raises(ConfigError, match=r"or table_folder='FOLDER' on a disk"):
        trainer.fit(NodeClassifier(net, 3), data)
    assert net.num_counts < 100


def test_weights_beside_the_pipelined_module_are_counted() -> None:
    """With their gradients and optimizer states, unless they are frozen."""

    class Beside(NodeClassifier):
        def __init__(self, is_frozen: bool) -> None:
            super().__init__(GNN(8, WIDTH, 3, NUM_LAYERS, 0.0), 3)
            self.more = nn.Embedding(1000, 512).requires_grad_(not is_frozen)

    needed = []
    for make in (None, True, False):
        _, data = make_inputs()
        module = (
            NodeClassifier(GNN(8, WIDTH, 3, NUM_LAYERS, 0.0), 3) if make is None else Beside(make)
        )
        trainer = make_trainer(1, 4, strategy={"memory_gib": 1e-6})
        with pytest.raises(ConfigError, match=r"it would take (\S+) GiB") as caught:
            trainer.fit(module, data)
        found = re.search(r"take (\S+) GiB", str(caught.value))
        assert found is not None
        needed.append(float(found[1]) * 2**30)
    of_more = 4 * 1000 * 512
    assert needed[1] - needed[0] == pytest.approx(of_more, rel=0.15)
    assert needed[2] - needed[0] == pytest.approx(4 * of_more, rel=0.15)


def test_what_cannot_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    text = (
        r"Training does not fit into memory_gib=1e-06: it would take (\S+) GiB\.\n"
        r"That is the least, with num_chunks=\d+.*\.\n"
        r"Write memory_gib=(\S+), or table_folder='FOLDER' on a disk, (\S+) GiB\."
    )
    with pytest.raises(ConfigError, match=text) as caught:
        fit(memory_gib=1e-6)
    found = re.search(text, str(caught.value))
    assert found is not None and float(found[3]) < float(found[1]) < float(found[2])
    fit(memory_gib=float(found[2]))
    fit(memory_gib=1.01 * float(found[3]), table_folder=tmp_path)
    with pytest.raises(ConfigError, match="more stages do not suffice"):
        fit(memory_gib=1e-6, table_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"or Trainer\(devices=[2-9]\), \S+ GiB each\."):
        fit(memory_gib=0.9 * float(found[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stages", "share"),
    [
        ("gcn", 1, 0.95),
        ("gcn", 2, 0.9),
        ("gcnii+norm", 2, 0.7),
        ("sage", 2, 0.8),
        ("gat", 2, 0.7),
    ],
)
def test_the_measured_peak_is_within_the_budget(
    model: str, stages: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a `share` of what is predicted without saving; tensors are of several MiB, as in use."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "benchmarks")
    common = import_module("common")
    cell = {"model": model, "stages": stages, "nodes": 40_000, "edges": 400_000, "layers": 8}
    cell |= {"hidden": 64, "chunks": "auto"}
    free = common.train_once(mode="plan", **{**cell, "chunks": 8})["memory_mib"]
    run = common.train_once(validate=True, warm=1, steps=2, memory_gib=share * free / 1024, **cell)
    assert max(run["anonymous_mib"]) <= 1.05 * share * free

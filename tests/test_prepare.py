"""A graph in a folder: trained as from memory, without copies; whole, or refused by name."""

from __future__ import annotations

import json
import os
import resource
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from gnnpipe import main
from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, datamodule, prepare_graph
from lightning_gnnpipe.chunks.costs import InputSizes
from lightning_gnnpipe.errors import ConfigError, GNNPipeError, GraphError
from lightning_gnnpipe.graph import ContentNumbers, fingerprint, partition_nodes, stored
from lightning_gnnpipe.graph import partition as partitions
from lightning_gnnpipe.graph import plan as plans
from lightning_gnnpipe.graph.fingerprint import tensor_fingerprint
from lightning_gnnpipe.passing import sparse
from tests.helpers.trainers import assert_same, quiet_trainer

NUM_NODES, NUM_CHUNKS = 60, 4


def make_graph(dtype: torch.dtype = torch.float64) -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(NUM_NODES, 6, generator=generator, dtype=torch.float64).to(dtype),
        edge_index=torch.randint(NUM_NODES, (2, 200), generator=generator),
        edge_weight=torch.rand(200, generator=generator, dtype=torch.float64),
        y=torch.randint(3, (NUM_NODES,), generator=generator),
        scale=torch.tensor([[0.5, 2.0]]),
        title="small",
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GCNConv(*sizes) for sizes in [(6, 8), (8, 8), (8, 3)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.elu(conv(x, edge_index, edge_weight))
        return x


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net().double()

    def forward(self, data: Data) -> Tensor:
        return self.net(data.x, data.edge_index, data.edge_weight)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(data)[data.train_mask], data.y[data.train_mask])

    def validation_step(self, data: Data, batch_idx: int) -> None:
        rows, labels = self(data)[data.val_mask], data.y[data.val_mask]
        self.log("val_loss", F.cross_entropy(rows, labels), batch_size=1)

    def predict_step(self, data: Data, batch_idx: int) -> dict[str, Tensor]:
        rows = self(data)
        return {"rows": rows, "labels": data.y, "mean": rows.mean(0)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return prepare_graph(make_graph(), tmp_path / "graph", num_chunks=NUM_CHUNKS)


class Writer(BasePredictionWriter):
    def write_on_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, prediction: Any, *args: Any
    ) -> None:
        if trainer.is_global_zero:
            torch.save(prediction, "predicted.pt")


def train(data: Data | Path, num_ranks: int = 1, **strategy: Any) -> tuple[L.LightningModule, Any]:
    """Train for 4 epochs; return the module, and what it predicts."""
    options = {"max_epochs": 4, "callbacks": [Writer("batch")]}
    trainer = quiet_trainer(num_ranks, {"balance": "uniform", **strategy}, **options)
    module, datamodule = Module(), FullGraphDataModule(data)
    trainer.fit(module, datamodule=datamodule)
    trainer.predict(module, datamodule=datamodule)
    return module, torch.load("predicted.pt")


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (1, {"num_chunks": 1}),
        (2, {"graph_parallel": 2, "recompute": True, "history_dtype": "float64"}),
    ],
)
def test_a_folder_is_trained_as_the_graph_in_memory(
    num_ranks: int, options: dict[str, Any], folder: Path
) -> None:
    graph, given = make_graph(), dict[str, Any]()
    if "num_chunks" not in options and num_ranks > 1:  # one device keeps one chunk
        parts = partition_nodes(
            graph.edge_index, NUM_NODES, num_chunks=NUM_CHUNKS, method="metis", seed=0
        )
        given = {"partition": parts}
    (expected, there), (found, here) = (
        train(graph, num_ranks, **options, **given),
        train(folder, num_ranks, **options),
    )
    assert_same(found, expected)
    assert torch.equal(here["labels"], graph.y)
    for name in ("rows", "mean"):
        torch.testing.assert_close(here[name], there[name], rtol=0, atol=1e-10)


class Scales(L.Callback):
    """Changes the weights of edges before the last epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 3:
            next(iter(trainer.train_dataloader)).edge_weight.mul_(0.5)


def test_weights_of_edges_may_change_in_place(folder: Path) -> None:
    found = []
    for data in (make_graph(), folder):
        trainer = quiet_trainer(1, {"num_chunks": 1}, max_epochs=4, callbacks=[Scales()])
        module, datamodule = Module(), FullGraphDataModule(data)
        trainer.fit(module, datamodule=datamodule)
        found.append(module)
    assert_same(*found)


def test_nothing_is_copied_read_or_cut_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check_graph", "partition_nodes", "plan_from_assignment", "edge_cut_frac"):
        monkeypatch.setattr(f"lightning_gnnpipe.engine.known_graphs.{name}", None)
    hashed = list[tuple[int, ...]]()

    def count(tensor: Tensor) -> int:
        hashed.append(tuple(tensor.shape))
        return tensor_fingerprint(tensor)

    monkeypatch.setattr("lightning_gnnpipe.graph.fingerprint.tensor_fingerprint", count)
    kept = list[int]()

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            graphs = trainer.strategy.engine.graphs
            kept.append(graphs.trained.inputs.num_bytes)
            kept.append(graphs.trained.graph.plan.num_chunks)

    for num_chunks in (NUM_CHUNKS, "auto"):
        strategy = {"self_check": False, "num_chunks": num_chunks}
        trainer = quiet_trainer(1, strategy, max_epochs=3, callbacks=[Look()])
        trainer.fit(Module(), datamodule=FullGraphDataModule(folder))
    assert kept == [0, NUM_CHUNKS, 0, 1]
    assert hashed == []


def test_layers_are_timed_in_the_folders_chunks_with_the_matrices_of_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[int]()
    make = sparse.Pattern.__init__

    def count(self: sparse.Pattern, *args: Any) -> None:
        made.append(1)
        make(self, *args)

    monkeypatch.setattr(sparse.Pattern, "__init__", count)
    monkeypatch.setattr("lightning_gnnpipe.chunks.timing.plan_from_assignment", None)
    strategy = {"self_check": False, "exact_in_chunks": True, "memory_gib": 1.0}
    trainer = quiet_trainer(1, {**strategy, "recompute": True}, max_epochs=3)
    trainer.fit(Module(), datamodule=FullGraphDataModule(folder))
    assert len(made) == 1


class MaxNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            GCNConv(*sizes, aggr="max", add_self_loops=False) for sizes in [(6, 8), (8, 3)]
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("num_sanity_val_steps", [0, 1])
def test_matrices_in_files_serve_training_after_a_validation(
    num_sanity_val_steps: int, folder: Path, tmp_path: Path
) -> None:
    weights = list[list[Tensor]]()
    for tables in (None, tmp_path / "tables"):
        module = Module()
        torch.manual_seed(2)
        module.net = MaxNet().double()
        options = {"max_epochs": 3, "num_sanity_val_steps": num_sanity_val_steps}
        strategy = {"table_folder": tables, "num_chunks": NUM_CHUNKS}
        trainer = quiet_trainer(1, strategy, **options)
        trainer.fit(module, datamodule=FullGraphDataModule(folder))
        weights.append([one.detach() for one in module.parameters()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


def test_memory_is_predicted_without_the_files_of_a_folder(folder: Path) -> None:
    def sizes(data: Any, **options: Any) -> InputSizes:
        found = list[InputSizes]()

        class Look(L.Callback):
            def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
                found.append(trainer.strategy.engine.model.costs.sizes)

        strategy = {"memory_gib": 1.0, **options}
        trainer = quiet_trainer(1, strategy, max_epochs=1, callbacks=[Look()])
        trainer.fit(Module(), datamodule=FullGraphDataModule(data))
        return found[0]

    mapped, cut_anew, held = (
        sizes(folder),
        sizes(folder, partition="random", num_chunks=NUM_CHUNKS),
        sizes(make_graph(), num_chunks=NUM_CHUNKS),
    )
    assert (mapped.is_mapped, cut_anew.is_mapped, held.is_mapped) == (True, False, False)
    assert mapped.given_bytes == 0 < cut_anew.given_bytes == held.given_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_tensors_are_those_of_the_graph_in_the_order_of_its_plan(
    dtype: torch.dtype, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_BLOCK_BYTES", block)
    graph = make_graph(dtype)
    graph.empty = torch.empty(0, 3)
    graph.number = torch.tensor(2.5)
    found = FullGraphDataModule(prepare_graph(graph, tmp_path / "g", num_chunks=3)).data
    order, there = found.n_id, FullGraphDataModule(graph).data
    assert sorted(order.tolist()) == list(range(NUM_NODES))
    for name in ("x", "y", "train_mask", "test_mask"):
        assert found[name].dtype == there[name].dtype and found[name].equal(there[name][order])
    assert all(found[name].equal(graph[name]) for name in ("scale", "empty", "number"))
    assert found.title == "small" and found.num_nodes == NUM_NODES
    edges, weights = graph.edge_index.tolist(), graph.edge_weight.tolist()
    ours = zip(*order[found.edge_index].tolist(), found.edge_weight.tolist(), strict=True)
    assert sorted(ours) == sorted(zip(*edges, weights, strict=True))
    assert found.edge_index[1].diff().min() >= 0
    numbers = ContentNumbers()
    for _name, one in found:
        if isinstance(one, Tensor):
            assert numbers.of(one) == tensor_fingerprint(one)
    found.x[0] += 1
    assert numbers.of(found.x) == tensor_fingerprint(found.x)  # a write is seen


def test_arrays_are_prepared_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, arrays = FullGraphDataModule(make_graph()).data, tmp_path / "arrays"
    arrays.mkdir()
    del graph.title
    for name, one in graph:
        np.save(arrays / f"{name}.npy", one.numpy())
    expected = prepare_graph(graph, tmp_path / "expected", num_chunks=3)
    command = ["gnnpipe", "prepare", str(arrays), str(tmp_path / "found"), "--num_chunks=3"]
    monkeypatch.setattr("sys.argv", [*command])
    assert main() == 0 and "found is prepared" in capsys.readouterr().out
    for path in expected.glob("*.npy"):
        assert path.read_bytes() == (tmp_path / "found" / path.name).read_bytes()
    monkeypatch.setattr("sys.argv", [*command[:2], str(tmp_path / "none"), *command[3:]])
    assert main() == 1 and "got no folder" in capsys.readouterr().err


class Largest(TorchDispatchMode):
    """Keeps the bytes of the largest new tensor."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if is_dense(one)}
        for one in tree_leaves(found):
            if is_dense(one) and one.untyped_storage().data_ptr() not in known:
                self.num_bytes = max(self.num_bytes, one.nbytes)
        return found


def cut_and_forget(edge_index: Tensor, parts: Tensor) -> tuple[Tensor, Iterator[Any]]:
    """Cut, and see that of earlier chunks the last one alone is held."""
    nodes, chunks = plans.cut_in_turn(edge_index, parts)

    def watched() -> Iterator[Any]:
        known = list[weakref.ref[Tensor]]()
        for one in chunks:
            assert all(edges() is None for edges in known[:-1])
            known.append(weakref.ref(one.edges))
            yield one

    return nodes, watched()


def is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


@pytest.mark.parametrize(
    ("partition", "dtype"), [("contiguous", torch.int32), ("given", torch.int64)]
)
def test_the_edges_of_one_chunk_alone_are_held(
    partition: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any number of edges; the arrays are memory-mapped."""
    for module, name in ((plans, "_BLOCK"), (partitions, "_BLOCK"), (stored, "_BLOCK_BYTES")):
        monkeypatch.setattr(module, name, 1 << 10)
    monkeypatch.setattr(fingerprint, "_LARGE_BLOCK", 1 << 10)
    monkeypatch.setattr(plans, "_HELD", 1)
    num_edges, num_chunks, arrays = 200_000, 16, tmp_path / "arrays"
    arrays.mkdir()
    edges = torch.randint(NUM_NODES, (2, num_edges), generator=torch.Generator().manual_seed(0))
    np.save(arrays / "edge_index.npy", edges.to(dtype).numpy())
    np.save(arrays / "edge_weight.npy", np.ones(num_edges, np.float32))
    np.save(arrays / "x.npy", np.ones((NUM_NODES, 2), np.float32))
    given: Any = torch.arange(NUM_NODES) % num_chunks if partition == "given" else partition
    monkeypatch.setattr(datamodule, "cut_in_turn", cut_and_forget)
    with Largest() as largest:
        prepare_graph(arrays, tmp_path / "graph", num_chunks=num_chunks, partition=given)
    of_chunk = 2 * 8 * num_edges / num_chunks  # pairs of 64 bits
    assert of_chunk / 2 < largest.num_bytes < 1.5 * of_chunk


def test_the_same_graph_is_left_and_another_refused(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare_graph(make_graph(), str(folder), num_chunks=NUM_CHUNKS) == folder
    for changes in ({"num_chunks": 3}, {"seed": 1}, {"partition": "random"}):
        with pytest.raises(ConfigError, match="graph to hold this graph in these chunks"):
            prepare_graph(make_graph(), folder, **{"num_chunks": NUM_CHUNKS, **changes})
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES: dict[str, tuple[Any, str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"no manifest.json.*prepare_graph\("),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 99), "a damaged manifest"),
    "foreign": (lambda f: (f / "manifest.json").write_text("[]"), "another manifest.json"),
    "newer": (lambda f: edit(f, version=2), "got version 2; this package reads version 1"),
    "other chunks": (lambda f: edit(f, chunks=[[1]]), "a manifest that does not fit"),
    "an array less": (lambda f: (f / "y.npy").unlink(), "y.npy that cannot be read"),
    "a short array": (lambda f: os.truncate(f / "x.npy", 999), "x.npy that cannot be read"),
    "an empty array": (lambda f: os.truncate(f / "plan.halo.npy", 0), "plan.halo.npy that cannot"),
    "of another": (lambda f: np.save(f / "y.npy", np.zeros(3, int)), r"shape \[3\], not int64 of"),
    "of floats": (lambda f: np.save(f / "y.npy", np.zeros(60)), r"y.npy with float64.*not int64"),
}


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_folder_that_is_not_whole_is_refused(damage: Any, text: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(GraphError, match=text):
        FullGraphDataModule(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"to be a graph that was prepared \(got no manifest"):
        FullGraphDataModule(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_process_killed_while_it_writes_leaves_no_folder(place: int, tmp_path: Path) -> None:
    folder, process = tmp_path / "graph", os.fork()
    if process == 0:
        calls, sync = [0], os.fsync

        def die(handle: int) -> None:
            calls[0] += 1
            os._exit(9) if calls[0] > place else sync(handle)

        os.fsync = die  # type: ignore[assignment]
        prepare_graph(make_graph(), folder, num_chunks=NUM_CHUNKS)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    assert [path.name for path in tmp_path.iterdir()] == ["graph.partial"]
    with pytest.raises(GraphError, match="no manifest"):
        FullGraphDataModule(folder)
    prepare_graph(make_graph(), folder, num_chunks=NUM_CHUNKS)
    assert FullGraphDataModule(folder).data.num_nodes == NUM_NODES
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("most_bytes", [0, 64, 900, 2000])
def test_a_write_that_fails_leaves_no_folder(
    most_bytes: int, is_killed: bool, tmp_path: Path
) -> None:
    graph = FullGraphDataModule(make_graph())  # which prints a line
    folder, process = tmp_path / "graph", os.fork()
    if process == 0:
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            prepare_graph(graph, folder, num_chunks=NUM_CHUNKS)
        except ConfigError as error:
            status = 3 if "Nothing is left of it" in str(error) else 4
        finally:
            os._exit(status)
    expected = -signal.SIGXFSZ if is_killed else 3
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == expected
    assert [one.name for one in tmp_path.iterdir()] == ["graph.partial"] * is_killed
    prepare_graph(make_graph(), folder, num_chunks=NUM_CHUNKS)
    assert FullGraphDataModule(folder).data.num_nodes == NUM_NODES


def test_processes_that_prepare_at_once_share_one_folder(tmp_path: Path) -> None:
    processes = []
    for _number in range(3):
        process = os.fork()
        if process == 0:
            status = 1
            try:
                found = prepare_graph(make_graph(), tmp_path / "graph", num_chunks=NUM_CHUNKS)
                status = 0 if FullGraphDataModule(found).data.num_nodes == NUM_NODES else 2
            finally:
                os._exit(status)
        processes.append(process)
    for process in processes:
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match=r"to write .*No space left.*Nothing is left of it"):
        prepare_graph(make_graph(), tmp_path / "graph", num_chunks=NUM_CHUNKS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("train_index", torch.arange(5), r"got 'train_index', \[5\].*del data.train_index"),
        ("nodes", torch.arange(5), r"got 'nodes', \[5\].*use a mask"),
        ("adj_t", torch.eye(NUM_NODES).to_sparse(), "got 'adj_t'"),
        ("n_id", torch.arange(NUM_NODES), "got 'n_id'"),
        ("notes", ["a", "b"], "got 'notes', list"),
    ],
)
def test_values_that_a_folder_cannot_hold_are_refused(
    name: str, value: Any, text: str, tmp_path: Path
) -> None:
    graph = make_graph()
    graph[name] = value
    with pytest.raises(GraphError, match=text):
        prepare_graph(graph, tmp_path / "graph", num_chunks=2)
    assert not list(tmp_path.iterdir())


def test_other_chunks_than_the_folders_are_refused_or_cut(folder: Path) -> None:
    with pytest.raises(GNNPipeError, match=r"3 chunks.*got 4.*or a folder in chunks"):
        train(folder, num_chunks=3)
    with pytest.raises(ConfigError, match="'partition' to be one of metis"):
        prepare_graph(make_graph(), folder, num_chunks=2, partition="best")  # type: ignore[arg-type]
    parts = torch.arange(NUM_NODES) % 3
    expected, _ = train(make_graph(), partition=parts)
    order = FullGraphDataModule(folder).data.n_id
    assert_same(train(folder, partition=parts[order])[0], expected)


def test_folders_are_trained_in_turn_each_in_its_own_chunks(folder: Path, tmp_path: Path) -> None:
    nodes = torch.arange(NUM_NODES - 10)
    second = prepare_graph(make_graph().subgraph(nodes), tmp_path / "second", num_chunks=3)
    found, chunks = list[L.LightningModule](), list[int]()

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            chunks.append(trainer.strategy.engine.graphs.trained.graph.plan.num_chunks)

    for num_ranks in (1, 2):
        strategy = {"balance": "uniform", "history_dtype": "float64"}  # chunks on one stage too
        trainer = quiet_trainer(num_ranks, strategy, max_epochs=3, callbacks=[Look()])
        loader = DataLoader([FullGraphDataModule(one).data for one in (folder, second)], None)
        module = Module()
        trainer.fit(module, loader)
        found.append(module)
    assert chunks == [NUM_CHUNKS, 3] * 3  # of this process
    assert_same(*found)


def test_the_folders_chunks_are_planned(folder: Path) -> None:
    plan = GNNPipeStrategy().plan(Module(), FullGraphDataModule(folder), num_stages=2)
    parts = FullGraphDataModule(folder).data.stored.plan.chunks
    assert plan.chunk_rows == tuple(chunk.num_nodes for chunk in parts)


@pytest.mark.parametrize("pack", [lambda data: (data, 0), lambda data: {"graph": data}])
def test_arrays_and_graphs_within_batches_are_predicted_in_the_users_order(
    pack: Any, folder: Path
) -> None:
    class Packed(Module):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            data = batch["graph"] if isinstance(batch, dict) else batch[0]
            return [data.y.numpy(), self(data)]

    loader = DataLoader([pack(FullGraphDataModule(folder).data)], batch_size=None)
    [(labels, rows)] = quiet_trainer(1, {}).predict(Packed(), loader)
    graph = make_graph()
    np.testing.assert_array_equal(labels, graph.y.numpy())
    torch.testing.assert_close(rows, Module()(graph), rtol=0, atol=1e-10)


def test_a_part_of_a_folders_graph_is_trained_as_from_memory(folder: Path) -> None:
    def fit(data: Data) -> Module:
        module, part = Module(), data.subgraph(torch.arange(40))
        strategy = {"num_chunks": 4, "balance": "uniform"}
        quiet_trainer(1, strategy, max_epochs=3).fit(module, DataLoader([part], batch_size=None))
        return module

    opened = FullGraphDataModule(folder).data
    from_memory = Data(**{name: one for name, one in opened if isinstance(one, Tensor)})
    assert_same(fit(opened), fit(from_memory))


def test_weights_of_nodes_are_said_to_be_in_the_folders_order(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Embedded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(NUM_NODES, 6)

        def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
            return super().forward(x + self.emb.weight, edge_index, edge_weight)

    module = Module()
    module.net = Embedded().double()
    quiet_trainer(1, {}, max_epochs=2).fit(module, datamodule=FullGraphDataModule(folder))
    found = [one.message for one in caplog.records if "order of the folder" in one.message]
    assert len(found) == 1 and found[0].startswith("Rows of emb.weight are in")


def test_a_folder_that_another_process_removed_is_locked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that held the lock failed, and removed the folder, while this one waited."""
    path, lock, removed = tmp_path / "graph.partial", stored.fcntl.flock, list[int]()

    def wait(handle: int, kind: int) -> None:
        lock(handle, kind)
        if not removed:
            removed.append(path.stat().st_ino)
            path.rename(tmp_path / "gone")

    monkeypatch.setattr(stored.fcntl, "flock", wait)
    with stored._locked(path) as handle:
        assert os.fstat(handle).st_ino == path.stat().st_ino != removed[0]


def test_a_row_for_each_pair_of_nodes_is_refused(tmp_path: Path) -> None:
    graph = make_graph()
    graph.distances = torch.rand(NUM_NODES, NUM_NODES)
    with pytest.raises(GraphError, match="distances"):
        prepare_graph(graph, tmp_path / "graph", num_chunks=2)

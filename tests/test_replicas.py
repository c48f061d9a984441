"""The data axis as Lightning sees it: equal to its DDP; loaders, random numbers, refusals."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torchmetrics import MeanMetric

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.models import GNN, NodeClassifier
from lightning_gnnpipe.trainer.loaders import SameLengthLoader
from tests.helpers.batches import (
    NUM_FEATURES,
    NUM_TARGETS,
    SIZES,
    WIDTH,
    GraphModule,
    draw_batch,
)
from tests.helpers.cases import slow
from tests.helpers.launch import FitResult, fit_batches
from tests.helpers.record import assert_steps_equal


class Normed(nn.Module):
    """BatchNorm, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.SAGEConv(NUM_FEATURES, WIDTH), gnn.SAGEConv(WIDTH, WIDTH)])
        self.norms = nn.ModuleList(gnn.BatchNorm(WIDTH) for _ in self.convs)
        self.lin_out = nn.Linear(WIDTH, NUM_TARGETS)

    def forward(self, data: Batch) -> Tensor:
        x = data.x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, data.edge_index)).relu()
        return self.lin_out(gnn.global_mean_pool(x, data.batch, data.num_graphs))


class NormedModule(GraphModule):
    """A second norm behind the pipelined module, and a loader of its own."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            super().__init__(net=Normed())
        self.norm = nn.BatchNorm1d(NUM_TARGETS).double()
        self.mean = MeanMetric().set_dtype(torch.float64)

    def forward(self, data: Batch) -> Tensor:
        return self.norm(self.net(data))

    def training_step(self, data: Batch, batch_idx: int) -> dict[str, Tensor]:
        found = super().training_step(data, batch_idx)
        self.log("synced", found["loss"].detach(), sync_dist=True, on_epoch=True, batch_size=3)
        self.log("most", data.num_graphs, sync_dist=True, reduce_fx="max", batch_size=1)
        return found

    def validation_step(self, data: Batch, batch_idx: int) -> None:
        loss = self.loss(self(data), data)
        self.mean.update(loss, weight=data.num_graphs)
        self.log("val_loss", loss, batch_size=data.num_graphs, sync_dist=True)
        self.log("mean", self.mean, batch_size=data.num_graphs)


class GraphData(L.LightningDataModule):
    """The loaders, made anew in each process; the graphs are changed at random.

    Args:
        num_workers: Of each rank, which change them. They are forked by a process without
            threads: a rank has those of gloo, and the fork of one might wait for ever.
    """

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"num_workers": num_workers}
        if num_workers:
            self.options |= {"multiprocessing_context": "forkserver", "persistent_workers": True}
        self.graphs = draw_batch(SIZES + SIZES).to_data_list()

    def train_dataloader(self) -> DataLoader:
        graphs = Noisy(self.graphs)
        return DataLoader(graphs, batch_size=3, shuffle=True, drop_last=True, **self.options)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.graphs[:11], batch_size=2)  # one graph is validated on twice


class Noisy(Dataset):
    """Adds noise to the features whenever a graph is read."""

    def __init__(self, graphs: list[Data]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Data:
        graph = copy.copy(self.graphs[index])
        graph.x = graph.x + torch.randn_like(graph.x)
        return graph


class KeepsBuffers(L.Callback):
    """Writes the buffers that validation uses, of each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, *args: Any
    ) -> None:
        buffers = dict(module.named_buffers())
        torch.save(buffers, self.folder / f"buffers_{trainer.global_rank}.pt")


@pytest.mark.parametrize(("accumulated", "num_workers"), [(1, 0), (2, 0), slow(1, 1)])
def test_one_stage_is_lightnings_ddp(accumulated: int, num_workers: int, tmp_path: Path) -> None:
    """The order of batches, losses, gradients, weights, running statistics and what is logged."""
    folders = [tmp_path / "ddp", tmp_path / "piped"]
    runs: list[FitResult] = []
    for num_stages, folder in enumerate(folders):
        folder.mkdir()
        data = GraphData(num_workers)
        run = fit_batches(
            NormedModule(),
            data,
            tmp_path=folder,
            num_stages=num_stages,
            num_replicas=2,
            max_epochs=3,
            callbacks=[KeepsBuffers(folder)],
            seeds_workers=True,
            trainer_kwargs={
                "limit_val_batches": 1.0,
                "accumulate_grad_batches": accumulated,
                "gradient_clip_val": 0.5 if accumulated > 1 else None,
            },
        )
        runs.append(run)
    ddp, piped = runs
    for steps, expected in zip([piped.steps, *piped.others], [ddp.steps, *ddp.others], strict=True):
        assert_steps_equal(steps, expected)
    assert not torch.allclose(piped.steps[0].outputs, piped.others[0][0].outputs)
    logged = [
        {name: value.item() for name, value in run.trainer.callback_metrics.items()} for run in runs
    ]
    assert logged[1] == pytest.approx(logged[0], rel=1e-10)
    for rank in range(2):
        used, expected_ = (
            torch.load(folder / f"buffers_{rank}.pt", weights_only=True) for folder in folders
        )
        for name, value in expected_.items():
            torch.testing.assert_close(used[name], value, rtol=1e-10, atol=1e-10)
    for name, value in ddp.state_dict.items():
        torch.testing.assert_close(piped.state_dict[name], value, rtol=1e-10, atol=1e-10)


class Uneven(IterableDataset):
    """Graphs of this process alone: more of them on the second replica."""

    def __init__(self, graphs: list[Data], num_batches: tuple[int, int]) -> None:
        self.graphs, self.num_batches = graphs, num_batches
        self.replica: Callable[[], int] = lambda: 0

    def __iter__(self) -> Iterator[Data]:
        return iter(self.graphs[: 2 * self.num_batches[self.replica()]])


class UnevenModule(GraphModule):
    """Shards its data set itself, as an `IterableDataset` has to be."""

    def __init__(self, num_batches: tuple[int, int]) -> None:
        super().__init__()
        self.data = Uneven(draw_batch(SIZES).to_data_list(), num_batches)

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        self.data.replica = lambda: strategy.distributed_sampler_kwargs["rank"]
        return DataLoader(self.data, batch_size=2)

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


def make_trainer(num_ranks: int, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """Return a Trainer of two replicas."""
    return L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=GNNPipeStrategy(
            **{"data_parallel": 2, "num_chunks": 2, "start_method": "fork", **options}
        ),
        max_epochs=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize("num_batches", [(3, 3), (2, 3), (3, 2)])
def test_replicas_that_run_out_of_batches_end_all(num_batches: tuple[int, int]) -> None:
    trainer = make_trainer(4, timeout=timedelta(seconds=20))
    if num_batches[0] == num_batches[1]:
        trainer.fit(UnevenModule(num_batches))
        return
    with pytest.raises(Exception, match="Expected the same number of batches on all ranks"):
        trainer.fit(UnevenModule(num_batches))


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ((3, 4), "3, 4, by rank"),
        ((3, None), "3, unknown, by rank"),
        ((None, None), "2, more than 2, by rank"),
        ((4, 4), "2, more than 2, by rank"),
    ],
)
def test_uneven_loaders_are_refused_on_all_ranks(
    lengths: tuple[int | None, int | None], found: str
) -> None:
    """Two threads stand for ranks; the second loader has another batch behind its second."""

    def read(rank: int, gather: Any) -> None:
        list(SameLengthLoader(Sized(2 + rank, lengths[rank]), gather))

    for text in in_threads(read):
        assert text.startswith(f"Expected the same number of batches on all ranks (got {found}")


def test_even_loaders_yield_everything() -> None:
    def read(rank: int, gather: Any) -> None:
        loader = SameLengthLoader(Sized(3, 3), gather)
        assert len(loader) == 3 and loader.length == 3
        assert [list(loader), list(loader)] == [[0, 1, 2]] * 2
        raise ConfigError("done")

    assert in_threads(read) == ["done", "done"]


class Sized:
    """Counts; says that it has `length` batches, if that is not None."""

    def __init__(self, num_batches: int, length: int | None) -> None:
        self.num_batches, self.length = num_batches, length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_batches))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError
        return self.length


def in_threads(work: Callable[[int, Any], object]) -> list[str]:
    """Run `work` on two ranks, each a thread; return the texts of their ConfigErrors."""
    barrier, sent, texts = threading.Barrier(2, timeout=10), [[0], [0]], ["", ""]

    def run(rank: int) -> None:
        def gather(numbers: Sequence[int]) -> list[list[int]]:
            sent[rank] = list(numbers)
            barrier.wait()
            found = [list(one) for one in sent]
            barrier.wait()
            return found

        try:
            work(rank, gather)
        except ConfigError as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def test_one_graph_is_refused() -> None:
    nodes = torch.arange(12)
    edges = torch.stack([nodes, (nodes + 1) % 12])
    ring = Data(x=torch.rand(12, 5), edge_index=edges, y=nodes % 3)
    module = NodeClassifier(GNN(5, 8, 3, num_layers=2), 3)
    with pytest.raises(Exception, match="Expected batches of graphs for data_parallel"):
        make_trainer(2).fit(module, datamodule=FullGraphDataModule(ring))
    strategy = GNNPipeStrategy(data_parallel=2, num_chunks=2)
    with pytest.raises(UnsupportedError, match="on which all 2 replicas would compute the same"):
        strategy.plan(module, FullGraphDataModule(ring))


def test_batches_of_one_graph_are_no_single_graph() -> None:
    """A plain Batch of one graph, whose batch vector the pipelined module is not given."""
    graphs = draw_batch(SIZES).to_data_list()[:6]
    for graph in graphs:
        graph.y = torch.zeros(graph.num_nodes, dtype=torch.long)
        graph.train_mask = torch.ones(graph.num_nodes, dtype=torch.bool)
        graph.x = graph.x.float()
    module = NodeClassifier(GNN(5, 8, 3, num_layers=2), 3)
    make_trainer(2).fit(module, DataLoader(graphs, batch_size=1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"data_parallel": 0}, "'data_parallel' to be at least 1"),
        ({"data_parallel": True}, "'data_parallel' to be at least 1"),
        ({"data_parallel": 2, "graph_parallel": 2}, "'graph_parallel' to be 1 with data_parallel"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GNNPipeStrategy(**options)


def test_processes_are_dealt_out_to_replicas_first() -> None:
    options = GNNPipeStrategy(data_parallel=2).options
    assert options.resolve_layout(2) == (1, 1)
    assert options.resolve_layout(6) == (3, 1)
    with pytest.raises(ConfigError, match="'data_parallel' to divide the number of processes, 3"):
        options.resolve_layout(3)
    with pytest.raises(
        ConfigError,
        match=r"'num_stages' to be 3 for 6 processes .* data_parallel=2 \(got 2\). "
        r"Use Trainer\(devices=4\)",
    ):
        GNNPipeStrategy(data_parallel=2, num_stages=2).options.resolve_layout(6)


def test_p3_dropout_differs_between_replicas_and_not_with_stages(tmp_path: Path) -> None:
    """Replicas that are given the same batches, in lists, which no sampler splits."""
    batches = [draw_batch(SIZES, seed) for seed in range(3)]

    def run(num_stages: int, num_replicas: int) -> FitResult:
        return fit_batches(
            GraphModule("gine", dropout=0.3),
            batches,
            num_stages=num_stages,
            num_replicas=num_replicas,
            num_chunks=3,
            tmp_path=tmp_path,
        )

    one, two = run(1, 2), run(2, 2)
    for steps, expected in zip([two.steps, *two.others], [one.steps, *one.others], strict=True):
        assert_steps_equal(steps, expected, 1e-12)
    assert not torch.allclose(one.steps[0].outputs, one.others[0][0].outputs)
    torch.testing.assert_close(one.steps[0].outputs, run(1, 1).steps[0].outputs)


class Optional(nn.Module):
    """Uses other weights where a batch has something more."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.SAGEConv(NUM_FEATURES, WIDTH), gnn.SAGEConv(WIDTH, 2)])
        self.more = nn.Linear(1, NUM_FEATURES)

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, extra: Tensor | None = None
    ) -> Tensor:
        if extra is not None:
            x = x + self.more(extra)
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


class OptionalModule(GraphModule):
    """Gives more to the module from the third step on."""

    def __init__(self) -> None:
        super().__init__(net=Optional())

    def training_step(self, data: Batch, batch_idx: int) -> Tensor:
        extra = data.x[:, :1] if batch_idx > 1 else None
        return self.net(data.x, data.edge_index, data.batch, extra=extra).square().mean()


def test_a_batch_that_needs_other_weights_is_refused() -> None:
    loader = DataLoader(draw_batch(SIZES).to_data_list(), batch_size=2)
    with pytest.raises(Exception, match="every batch to use the same weights in the same stages"):
        make_trainer(2).fit(OptionalModule(), loader)


class Predicts(GraphModule):
    """Writes what its replica has predicted."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.kept = folder, list[Tensor]()

    def test_step(self, data: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(self(data), data), batch_size=data.num_graphs, sync_dist=True)

    def predict_step(self, data: Batch, batch_idx: int) -> None:
        self.kept.append(self(data))

    def on_predict_epoch_end(self) -> None:
        replica = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        torch.save(torch.cat(self.kept), self.folder / f"predictions_{replica}.pt")


def test_test_and_predict_cover_every_graph_once(tmp_path: Path) -> None:
    """Replicas predict different numbers of batches, of which none is read twice."""
    graphs = draw_batch(SIZES).to_data_list()[:10]
    module = Predicts(tmp_path)
    whole = Batch.from_data_list(graphs)
    expected = module.eval()(whole).detach()

    tested = make_trainer(4).test(module, DataLoader(graphs, batch_size=2))
    assert tested[0]["loss"] == pytest.approx(module.loss(expected, whole).item(), rel=1e-10)

    uneven = DataLoader(graphs[:9], batch_size=2)  # 5 and 4 graphs: 3 and 2 batches
    make_trainer(4).predict(module, uneven, return_predictions=False)
    first, second = (torch.load(tmp_path / f"predictions_{i}.pt") for i in range(2))
    torch.testing.assert_close(first, expected[0:9:2], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(second, expected[1:9:2], rtol=1e-10, atol=1e-10)

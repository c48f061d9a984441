"""The data axis as Lightning sees it: loaders, random numbers, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.trainer.replicas import SameLengthLoader
from tests.helpers import observed
from tests.helpers.batches import SIZES, GraphModule, draw_batch
from tests.helpers.launch import FitResult, fit_batches
from tests.helpers.record import assert_steps_equal


class Stream(IterableDataset):
    def __init__(self, graphs: list[Data]) -> None:
        self.graphs = graphs

    def __iter__(self) -> Iterator[Data]:
        return iter(self.graphs)


class Uneven(GraphModule):
    """Shards its data set itself, as an `IterableDataset` has to be."""

    def __init__(self, num_batches: tuple[int, int]) -> None:
        super().__init__()
        self.num_batches = num_batches

    def train_dataloader(self) -> DataLoader:
        replica = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        graphs = draw_batch(SIZES).to_data_list()[: 2 * self.num_batches[replica]]
        return DataLoader(Stream(graphs), batch_size=2)

    val_dataloader = train_dataloader


def make_trainer(num_ranks: int, **options: Any) -> L.Trainer:
    """Return a Trainer of two replicas."""
    return observed.make_trainer(
        num_ranks, 2, max_epochs=2, strategy={"data_parallel": 2, **options}
    )


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_batches", [(3, 3), (2, 3), (3, 2)])
def test_replicas_that_run_out_of_batches_end_all(num_batches: tuple[int, int]) -> None:
    error = pytest.raises(Exception, match="Expected the same number of batches on all ranks")
    with nullcontext() if num_batches == (3, 3) else error:
        make_trainer(4, timeout=timedelta(seconds=20)).fit(Uneven(num_batches))


class OwnGraphs(Uneven):
    """Each replica has drawn graphs of its own, which Lightning's sampler splits once more."""

    def train_dataloader(self) -> DataLoader:
        replica = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        return DataLoader(draw_batch(SIZES).to_data_list()[: 2 * self.num_batches[replica]])


def test_data_sets_of_different_lengths_are_refused_under_lightnings_sampler() -> None:
    with pytest.raises(Exception, match="Expected the same number of batches on all ranks"):
        make_trainer(2, timeout=timedelta(seconds=20)).fit(OwnGraphs((1, 2)))


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ((3, 4), "3, 4, by rank"),
        ((3, None), "3, unknown, by rank"),
        ((None, None), "2, more than 2, by rank"),
        ((4, 4), "2, more than 2, by rank"),
    ],
)
def test_uneven_loaders_are_refused(lengths: tuple[int | None, int | None], found: str) -> None:
    """The second of two ranks has another batch behind its second."""
    known = [-1 if one is None else one for one in lengths]
    for rank in range(2):
        sent = iter([known, *([turn < 2, turn < 3] for turn in range(3))])

        def gather(own: Sequence[int], rank: int = rank, sent: Any = sent) -> list[list[int]]:
            numbers = next(sent)
            assert own == [numbers[rank]]
            return [[one] for one in numbers]

        text = f"Expected the same number of batches on all ranks (got {found}"
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}"):
            list(SameLengthLoader(Sized(2 + rank, lengths[rank]), gather))


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


def test_one_graph_is_refused() -> None:
    module, data = observed.make_module(), observed.make_data()
    with pytest.raises(Exception, match="Expected batches of graphs for data_parallel"):
        make_trainer(2).fit(module, data)
    with pytest.raises(UnsupportedError, match="on which all 2 replicas would compute the same"):
        GNNPipeStrategy(data_parallel=2, num_chunks=2).plan(module, data)


def test_batches_of_one_graph_are_no_single_graph() -> None:
    """A plain Batch of one graph, whose batch vector the pipelined module is not given."""
    graphs = draw_batch(SIZES).to_data_list()[:6]
    for graph in graphs:
        graph.y = torch.zeros(graph.num_nodes, dtype=torch.long)
        graph.train_mask = torch.ones(graph.num_nodes, dtype=torch.bool)
        graph.x = graph.x.float()
    make_trainer(2).fit(observed.make_module(), DataLoader(graphs, batch_size=1))


@pytest.mark.slow
def test_p3_dropout_differs_between_replicas_and_not_with_stages(tmp_path: Path) -> None:
    """Replicas that are given the same batches, in lists, which no sampler splits."""
    batches = [draw_batch(SIZES, seed) for seed in range(3)]

    def run(num_stages: int, num_replicas: int) -> FitResult:
        options: dict[str, Any] = {"num_stages": num_stages, "num_replicas": num_replicas}
        module = GraphModule("gine", dropout=0.3)
        return fit_batches(module, batches, num_chunks=3, tmp_path=tmp_path, **options)

    one, two = run(1, 2), run(2, 2)
    for steps, expected in zip([two.steps, *two.others], [one.steps, *one.others], strict=True):
        assert_steps_equal(steps, expected, 1e-12)
    assert not torch.allclose(one.steps[0].outputs, one.others[0][0].outputs)
    torch.testing.assert_close(one.steps[0].outputs, run(1, 1).steps[0].outputs)


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

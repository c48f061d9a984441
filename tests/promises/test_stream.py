"""Passes without gradients over batch after batch: the same outputs, the pipeline kept full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.multiprocessing import ProcessRaisedException
from torch_geometric.data import Batch

from lightning_gnnpipe.batches import stream
from lightning_gnnpipe.graph import tensors_in
from tests.helpers.batches import ODD_SIZES, SIZES, GraphModule, draw_batch
from tests.helpers.launch import BatchList
from tests.helpers.staged import FreshBatches, Staged, batches_of_all_sizes, widened
from tests.helpers.trainers import quiet_trainer

NUM_BATCHES = 6


class Unsized(BatchList):
    """A loader that does not know its length."""

    __len__ = None  # type: ignore[assignment]


class Failing(BatchList):
    """A loader whose last batch cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches[:-1]
        raise RuntimeError("the last batch cannot be read")


class Writing(GraphModule):
    """Changes each batch in place before it calls the network."""

    def predict_step(self, data: Batch, batch_idx: int) -> Any:
        data.x.mul_(1 + batch_idx)
        return self(data)


class Copying(GraphModule):
    """Calls the network with what is not in the batch."""

    def __init__(self) -> None:
        super().__init__("weighted")

    def forward(self, data: Batch) -> Any:
        return self.net(data.x * 2.0, data.edge_index, data.edge_weight, data.batch, size=12)


class Twice(GraphModule):
    """Calls the network twice a batch."""

    def predict_step(self, data: Batch, batch_idx: int) -> Any:
        return self(data), self(data)


class Skipping(GraphModule):
    """Does not call the network on every batch."""

    def predict_step(self, data: Batch, batch_idx: int) -> Any:
        return self(data) if batch_idx % 3 else data.y


class Toggling(GraphModule):
    """Changes the network between calls."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 2:
            self.net.dropout = 0.7
        if batch_idx == 4:
            with torch.no_grad():
                self.net.lin_out.weight.mul_(2.0)


class PartlyTraining(GraphModule):
    """Has one of its layers in training mode."""

    def on_predict_start(self) -> None:
        self.net.convs[0].train()


class Hooked(GraphModule):
    """Changes batches on their way to the device."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        batch = batch.clone()
        batch.x = batch.x * 3.0
        return batch


class Passes(L.Callback):
    """Writes down, on each rank, its predictions, and counts.

    These are calls of the network, passes begun ahead and passes dropped; and, after each batch,
    the sends that are open.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts = {"run": 0, "run_ahead": 0, "drop": 0}
        self.predictions: list[Any] = []
        self.num_sends: list[int] = []

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.counts = dict.fromkeys(self.counts, 0)  # an earlier run's come back from its ranks
        if trainer.world_size == 1:
            return

        def counted(kind: type, name: str) -> None:
            method = getattr(kind, name)

            def count(*args: Any) -> Any:
                self.counts[name] += 1
                return method(*args)

            setattr(kind, name, count)

        # In a forked process of its own, so nothing has to be put back.
        counted(stream._Pass, "run_ahead")
        counted(stream._Pass, "drop")
        counted(stream.BatchStream, "run")

    def on_predict_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.predictions.append(args[1])
        if trainer.world_size > 1:
            self.num_sends.append(trainer.strategy.engine.transport.num_sends)

    def teardown(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            found = self.predictions, tuple(self.counts.values()), self.num_sends
            torch.save(found, self.folder / f"{trainer.global_rank}.pt")


def make_trainer(folder: Path, num_stages: int, num_chunks: int, **options: Any) -> L.Trainer:
    piped = {"num_chunks": num_chunks, "balance": "uniform"} if num_stages else None
    options = {"callbacks": [Passes(folder)], "default_root_dir": folder, **options}
    return quiet_trainer(max(num_stages, 1), piped, **options)


def batches() -> list[Any]:
    return [draw_batch(SIZES[: 12 - i], seed=i) for i in range(NUM_BATCHES)]


def counts(folder: Path, num_stages: int) -> tuple[int, int, int]:
    """Calls, passes begun ahead and passes dropped, which are the same on all ranks."""
    found = {torch.load(folder / f"{rank}.pt")[1] for rank in range(num_stages)}
    assert len(found) == 1
    return found.pop()


def compare(
    folder: Path,
    make: Any,
    num_stages: int,
    num_chunks: int,
    load: Any = BatchList,
    draw: Any = batches,
    **options: Any,
) -> tuple[int, int, int]:
    """Compare predictions on all ranks with one device's; return the counts."""
    expected = make_trainer(folder, 0, 1, **options).predict(make(), load(draw()))
    trainer = make_trainer(folder, num_stages, num_chunks, **options)
    trainer.predict(make(), load(draw()), return_predictions=False)
    for rank in range(num_stages):
        ours = torch.load(folder / f"{rank}.pt")[0]
        assert len(ours) == len(expected)
        both = (list(tensors_in(one)) for one in (ours, expected))
        torch.testing.assert_close(*both, rtol=1e-10, atol=1e-10)
    return counts(folder, num_stages)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("name", "num_stages", "num_chunks"),
    [("gine", 2, 3), ("weighted", 3, 1), ("jumping", 3, 5), ("gine", 3, 2)],
)
def test_predictions_equal_those_of_one_device(
    name: str, num_stages: int, num_chunks: int, tmp_path: Path
) -> None:
    """Stages work on two batches at a time: the first has sent all of the next one."""
    found = compare(tmp_path, lambda: GraphModule(name), num_stages, num_chunks)
    assert found == (NUM_BATCHES, NUM_BATCHES - 1, 0)
    first, *_, last = (torch.load(tmp_path / f"{rank}.pt")[2] for rank in range(num_stages))
    assert first[0] > 0 and first == [first[0]] * (NUM_BATCHES - 1) + [0]
    assert last == [0] * NUM_BATCHES


def test_loaders_without_length_and_limits(tmp_path: Path) -> None:
    found = compare(tmp_path, GraphModule, 2, 3, Unsized, limit_predict_batches=4)
    assert found == (4, 3, 0)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Writing, (NUM_BATCHES, 1, 1)),
        (Copying, (NUM_BATCHES, 0, 0)),
        (Twice, (2 * NUM_BATCHES, 1, 1)),
        (Skipping, (4, 2, 1)),
        (Hooked, (NUM_BATCHES, 0, 0)),
        (Toggling, (NUM_BATCHES, 2, 1)),
        (PartlyTraining, (NUM_BATCHES, 0, 0)),
    ],
)
def test_what_was_not_foreseen_is_right_all_the_same(
    make: Any, found: tuple[int, int, int], tmp_path: Path
) -> None:
    assert compare(tmp_path, make, 2, 2) == found


def test_odd_batches(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [draw_batch(sizes) for sizes in (SIZES, *ODD_SIZES.values(), SIZES)]

    assert compare(tmp_path, GraphModule, 3, 4, draw=draw)[2] == 0


@pytest.mark.parametrize(("num_stages", "num_virtual"), [(2, 2), (2, 3), (3, 2)])
def test_predictions_of_ranks_with_several_stages(
    num_stages: int, num_virtual: int, tmp_path: Path
) -> None:
    """Ranks are ahead of each other as far as they can be."""
    loader = FreshBatches([one.update({"x": widened(one.x)}) for one in batches_of_all_sizes()])
    plain = quiet_trainer().predict(Staged(), loader)
    piped = {"schedule": "interleaved", "num_virtual": num_virtual, "num_chunks": 4}
    trainer = quiet_trainer(num_stages, piped, callbacks=[Passes(tmp_path)])
    trainer.predict(Staged(), loader, return_predictions=False)
    for rank in range(num_stages):
        found = torch.load(tmp_path / f"{rank}.pt")[0]
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_validation_and_test_stream_between_training_steps(tmp_path: Path) -> None:
    def run(num_stages: int) -> dict[str, float]:
        L.seed_everything(1, verbose=False)
        trainer = make_trainer(tmp_path, num_stages, 3, max_epochs=2, val_check_interval=2)
        module = GraphModule()
        trainer.fit(module, BatchList(batches()[:4]), BatchList(batches()))
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        [tested] = trainer.test(module, BatchList(batches()), verbose=False)
        return metrics | tested

    plain = pytest.approx(run(0), rel=1e-6)
    assert run(1) == plain
    assert run(2) == plain
    assert counts(tmp_path, 2) == (NUM_BATCHES, NUM_BATCHES - 1, 0)  # of the test


class Counting(GraphModule):
    def on_predict_batch_end(self, *args: Any) -> None:
        with (Path(self.trainer.default_root_dir) / f"done_{self.global_rank}").open("a") as file:
            file.write("x")


def test_an_error_of_the_loader_comes_in_its_turn(tmp_path: Path) -> None:
    trainer, loader = make_trainer(tmp_path, 2, 2), Failing(batches())
    with pytest.raises(ProcessRaisedException, match="the last batch cannot be read"):
        trainer.predict(Counting(), loader, return_predictions=False)
    done = [path.read_text() for path in sorted(tmp_path.glob("done_*"))]
    assert done == ["x" * (NUM_BATCHES - 1)] * 2

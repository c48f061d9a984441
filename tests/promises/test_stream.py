"""Passes without gradients over batch after batch: the same outputs, the pipeline kept full."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException
from torch_geometric.data import Batch

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.batches import stream
from tests.helpers.batches import ODD_SIZES, SIZES, GraphModule, draw_batch
from tests.helpers.launch import BatchList

NUM_BATCHES = 6


class Unsized(Iterable[Any]):
    """A loader that does not know its length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


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
    """Writes down, on each rank, predictions, and how many passes were begun ahead, and dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun = self.dropped = self.calls = 0
        self.predictions: list[Any] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size == 1:
            return
        run_ahead, drop, run = stream._Pass.run_ahead, stream._Pass.drop, stream.BatchStream.run

        def count_ahead(one: Any) -> None:
            self.begun += 1
            run_ahead(one)

        def count_drop(one: Any) -> None:
            self.dropped += 1
            drop(one)

        def count_run(*args: Any) -> Any:
            self.calls += 1
            return run(*args)

        # In a forked process of its own, so nothing has to be put back.
        stream._Pass.run_ahead, stream._Pass.drop = count_ahead, count_drop
        stream.BatchStream.run = count_run

    def on_predict_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.predictions.append(args[1])

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size > 1:
            torch.save(self.predictions, self.folder / f"{trainer.global_rank}.pt")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            path = self.folder / f"{trainer.global_rank}.json"
            path.write_text(json.dumps([self.calls, self.begun, self.dropped]))


def make_trainer(folder: Path, num_stages: int, num_chunks: int, **options: Any) -> L.Trainer:
    strategy: Any = "auto"
    if num_stages:
        strategy = GNNPipeStrategy(num_chunks=num_chunks, start_method="fork", balance="uniform")
    return L.Trainer(
        accelerator="cpu",
        devices=max(num_stages, 1),
        strategy=strategy,
        logger=False,
        callbacks=[Passes(folder)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def batches() -> list[Any]:
    return [draw_batch(SIZES[: 12 - i], seed=i) for i in range(NUM_BATCHES)]


def flat(predictions: Any) -> list[Tensor]:
    if isinstance(predictions, Tensor):
        return [predictions]
    items = predictions.values() if isinstance(predictions, dict) else predictions
    return [tensor for item in items for tensor in flat(item)]


def counts(folder: Path) -> tuple[int, int, int]:
    """Calls, passes begun ahead and passes dropped, which are the same on all ranks."""
    found = {path.read_text() for path in folder.glob("*.json")}
    assert len(found) == 1
    return tuple(json.loads(found.pop()))


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
        ours = torch.load(folder / f"{rank}.pt")
        assert len(ours) == len(expected)
        for one, other in zip(flat(ours), flat(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    return counts(folder)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_chunks"),
    [("gine", 2, 3), ("weighted", 3, 1), ("jumping", 3, 5), ("gine", 3, 2)],
)
def test_predictions_equal_those_of_one_device(
    name: str, num_stages: int, num_chunks: int, tmp_path: Path
) -> None:
    found = compare(tmp_path, lambda: GraphModule(name), num_stages, num_chunks)
    assert found == (NUM_BATCHES, NUM_BATCHES - 1, 0)


def test_loaders_without_length_and_limits(tmp_path: Path) -> None:
    found = compare(tmp_path, GraphModule, 2, 3, Unsized, limit_predict_batches=4)
    assert found == (4, 3, 0)


@pytest.mark.parametrize(
    ("make", "calls", "begun", "dropped"),
    [
        (Writing, NUM_BATCHES, 1, 1),
        (lambda: Copying("weighted"), NUM_BATCHES, 0, 0),
        (Twice, 2 * NUM_BATCHES, 1, 1),
        (Skipping, 4, 2, 1),
        (Hooked, NUM_BATCHES, 0, 0),
        (Toggling, NUM_BATCHES, 2, 1),
        (PartlyTraining, NUM_BATCHES, 0, 0),
    ],
    ids=["writing", "copying", "twice", "skipping", "hooked", "toggling", "partly training"],
)
def test_what_was_not_foreseen_is_right_all_the_same(
    make: Any, calls: int, begun: int, dropped: int, tmp_path: Path
) -> None:
    assert compare(tmp_path, make, 2, 2) == (calls, begun, dropped)


def test_odd_batches(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [draw_batch(sizes) for sizes in (SIZES, *ODD_SIZES.values(), SIZES)]

    assert compare(tmp_path, GraphModule, 3, 4, draw=draw)[2] == 0


def test_validation_and_test_stream_between_training_steps(tmp_path: Path) -> None:
    def run(num_stages: int) -> dict[str, float]:
        L.seed_everything(1, verbose=False)
        trainer = make_trainer(tmp_path, num_stages, 3, max_epochs=2, val_check_interval=2)
        module = GraphModule()
        trainer.fit(module, BatchList(batches()[:4]), BatchList(batches()))
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        [tested] = trainer.test(module, BatchList(batches()), verbose=False)
        return metrics | tested

    assert run(2) == pytest.approx(run(0), rel=1e-6)
    assert counts(tmp_path) == (NUM_BATCHES, NUM_BATCHES - 1, 0)  # of the test


def test_an_error_of_the_loader_comes_in_its_turn(tmp_path: Path) -> None:
    class Counting(GraphModule):
        def on_predict_batch_end(self, *args: Any) -> None:
            with (tmp_path / f"done_{self.trainer.global_rank}").open("a") as file:
                file.write("x")

    with pytest.raises(ProcessRaisedException, match="the last batch cannot be read"):
        make_trainer(tmp_path, 2, 2).predict(
            Counting(), Failing(batches()), return_predictions=False
        )
    done = [path.read_text() for path in sorted(tmp_path.glob("done_*"))]
    assert done == ["x" * (NUM_BATCHES - 1)] * 2


def test_stages_work_on_two_batches_at_a_time(tmp_path: Path) -> None:
    """The first stage has sent all of the next batch when the call for this one returns."""

    class Watching(GraphModule):
        def predict_step(self, data: Batch, batch_idx: int) -> Any:
            result = self(data)
            strategy: Any = self.trainer.strategy
            pending = strategy.engine.transport.num_sends
            with (tmp_path / f"sent_{self.trainer.global_rank}").open("a") as file:
                file.write(f"{pending} ")
            return result

    make_trainer(tmp_path, 2, 3).predict(Watching(), BatchList(batches()), return_predictions=False)
    sent = [path.read_text().split() for path in sorted(tmp_path.glob("sent_*"))]
    first = [int(number) for number in sent[0]]
    assert first[-1] == 0
    assert len(set(first[:-1])) == 1
    assert first[0] > 0
    assert {int(number) for number in sent[1]} == {0}

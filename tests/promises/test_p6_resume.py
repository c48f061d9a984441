"""P6: a run that is resumed equals one that never stopped, whatever the stages and chunks are."""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe import EmbeddingRefresh, StalenessWarmup
from lightning_gnnpipe.chunks import StepCosts
from lightning_gnnpipe.trainer.checkpoints import histories_folder
from tests.helpers.cases import covering, slow
from tests.helpers.realistic import realistic_graph
from tests.helpers.record import StatsRecorder
from tests.helpers.trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("double")
SAVED_AT = 4
EPOCHS = 8


class Net(nn.Module):
    """Dropout, statistics and means of nodes, a linear and an attentive layer, one called twice.

    Each stage computes the encoder, whose rows are added behind all layers but the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin_in = nn.Linear(5, 8)
        self.first = gnn.GATv2Conv(5, 4, heads=2, dropout=0.1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), gnn.GraphNorm(8)])
        self.shared = gnn.GCNConv(8, 8)
        self.last = gnn.SAGEConv(8, 3, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x_0 = self.lin_in(x).relu()
        x = self.first(x, edge_index)
        for norm in self.norms:
            h = self.shared(norm(x), edge_index).relu() + x_0
            x = x + F.dropout(h, 0.3, self.training)
        return self.last(x, edge_index) + x_0[:, :3]


class Noisy(L.LightningModule):
    """Draws from every stream of random numbers in its step, for its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        out = self.net(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask]) * (1 + 0.1 * noise)
        self.log("loss", loss, batch_size=1)
        return loss

    def validation_step(self, data: Data, batch_idx: int) -> None:
        out = self.net(data.x, data.edge_index)
        self.log("val", F.cross_entropy(out, data.y), batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def loader(num_inputs: int, shuffle: bool = False) -> DataLoader:
    """Return a loader of as many graphs with the same edges, and with other features each."""
    graph = realistic_graph().apply(lambda value: value.to(torch.get_default_dtype()), "x")
    graphs = [copy.copy(graph) for _ in range(num_inputs)]
    for factor, one in enumerate(graphs, start=1):
        one.x = graph.x * factor
    return DataLoader(graphs, batch_size=None, shuffle=shuffle)


def fit(
    folder: Path,
    *,
    num_stages: int = 2,
    epochs: int = EPOCHS,
    resume: Path | None = None,
    callbacks: list[L.Callback] | None = None,
    precision: Any = None,
    num_inputs: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Train, save every epoch, return the last checkpoint."""
    # A resumed process was started with other random numbers.
    L.seed_everything(1 if resume is None else 2, verbose=False)
    saver = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    trainer = quiet_trainer(
        num_stages * options.get("graph_parallel", 1),
        {"num_chunks": 5, **options},
        precision=precision,
        max_epochs=epochs,
        callbacks=[saver, StalenessWarmup(num_epochs=2), *(callbacks or [])],
        enable_checkpointing=True,
    )
    loaders = loader(num_inputs, shuffle=True), loader(num_inputs)
    trainer.fit(Noisy(), *loaders, ckpt_path=resume)
    return torch.load(saved(folder, epochs), weights_only=True)


def saved(folder: Path, epochs: int = SAVED_AT) -> Path:
    """Return the checkpoint of a run after so many epochs."""
    return folder / f"epoch={epochs - 1}.ckpt"


def fit_in_two(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last checkpoint of a run that goes on, and of one that never stopped."""
    whole = fit(tmp_path / "whole", **options)
    return fit(tmp_path / "second", resume=saved(tmp_path / "whole"), **options), whole


VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "recompute": {"recompute": True},
    "bfloat16": {"history_dtype": torch.bfloat16},
    "snapshot": {"staleness": "gnnpipe"},
    "refresh": {"staleness": "constant", "callbacks": [EmbeddingRefresh(3)]},
    "constant_recompute": {"staleness": "constant", "recompute": True},
    "shards": {"graph_parallel": 2},
    "inputs": {"num_inputs": 2, "callbacks": [EmbeddingRefresh(2)]},
    "inputs_shards": {"num_inputs": 2, "graph_parallel": 2},
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("num_stages", "variant"), covering([1, 2, 3], VARIANTS))
def test_p6_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    num_stages: int, variant: str, tmp_path: Path
) -> None:
    second, whole = fit_in_two(tmp_path, **VARIANTS[variant], num_stages=num_stages)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "gnnpipe"):
        assert_same(second[name], whole[name], name)


@pytest.mark.parametrize("num_stages", [2, slow(1)])
def test_p6_a_run_goes_on_in_the_chunks_that_it_chose(
    num_stages: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both ranks of the first run have them."""
    whole = fit(tmp_path / "whole", num_chunks="auto")
    chosen = whole["gnnpipe"]["run"]["chosen_chunks"]
    assert chosen in (2, 4, 8, 16, 32)
    folder = histories_folder(saved(tmp_path / "whole", EPOCHS), whole["gnnpipe"]["histories"])
    for rank in range(2):
        stage = torch.load(folder / f"stage_{rank}.pt", weights_only=True)
        assert {len(part["ends"]) for parts in stage.values() for part in parts} == {chosen}

    monkeypatch.setattr(StepCosts, "choose_num_chunks", lambda *_: chosen + 1)
    resume = saved(tmp_path / "whole")
    found = fit(tmp_path / "second", num_chunks="auto", num_stages=num_stages, resume=resume)
    assert found["gnnpipe"]["run"]["chosen_chunks"] == chosen
    torch.testing.assert_close(found["state_dict"], whole["state_dict"], rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, slow(2)])
def test_p6_in_half_precision(num_shards: int, tmp_path: Path) -> None:
    """Norms give the dtypes of the run before, in the refresh before the fifth epoch too."""
    torch.set_default_dtype(torch.float32)
    where = {"graph_parallel": num_shards, "num_stages": 3 - num_shards}
    options = {"precision": "bf16-mixed", "callbacks": [EmbeddingRefresh(5)], **where}
    second, whole = fit_in_two(tmp_path, **options)
    assert_same(second["state_dict"], whole["state_dict"], "state_dict")


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("variant", ["inputs", "refresh", "defaults", "snapshot"])
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 3), (3, 2)])
def test_p6_another_number_of_stages_goes_on_alike(
    first: int, second: int, variant: str, tmp_path: Path
) -> None:
    options = VARIANTS[variant]
    whole = fit(tmp_path / "whole", num_stages=second, **options)
    fit(tmp_path / "first", epochs=SAVED_AT, num_stages=first, **options)
    resume = saved(tmp_path / "first")
    found = fit(tmp_path / "second", num_stages=second, resume=resume, **options)
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[key], whole[key], rtol=0, atol=1e-10)


NO_HISTORIES = "has no histories of this input"


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("first", "second", "was_exact", "text"),
    [
        # rows are taken, one by one where chunks are others: the next step is pipelined
        ({}, {}, False, ""),
        ({"num_stages": 2}, {"num_chunks": 3, "partition": "random"}, False, ""),
        ({"num_stages": 2}, {"num_chunks": 7, "partition": "random"}, False, ""),
        ({"staleness": "gnnpipe"}, {}, False, "staleness='gnnpipe', and this run has 'drift'"),
    ],
)
def test_p6_rows_are_taken_by_runs_with_other_options(
    first: dict[str, Any],
    second: dict[str, Any],
    was_exact: bool,
    text: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit(tmp_path / "first", epochs=SAVED_AT, **{"num_stages": 1, **first})
    stats = StatsRecorder()
    again: dict[str, Any] = {"resume": saved(tmp_path / "first"), "callbacks": [stats], **second}
    with caplog.at_level(logging.WARNING):
        fit(tmp_path / "second", num_stages=1, epochs=SAVED_AT + 2, **again)
    assert stats.was_exact == [was_exact, False]
    for one in ("and this run has", NO_HISTORIES):
        assert (one in caplog.text) == (one in text)
    assert text in caplog.text


def assert_same(found: Any, expected: Any, name: str) -> None:
    """Compare nested states bit for bit, but for the random name of the histories' folder."""
    assert type(found) is type(expected), name
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key in expected.keys() - {"histories"}:
            assert_same(found[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), name
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{name}.{index}")
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected), name
    else:
        assert found == expected, name


def test_p6_a_snapshot_is_not_taken_by_another_method(tmp_path: Path) -> None:
    """It goes on as from a run of the same weights that has kept nothing."""
    first = fit(tmp_path / "first", epochs=SAVED_AT, staleness="gnnpipe", num_stages=1)
    resume = saved(tmp_path / "first")
    more: dict[str, Any] = {"resume": resume, "staleness": "constant", "num_stages": 1}
    found = fit(tmp_path / "found", **more)
    path = histories_folder(resume, first["gnnpipe"]["histories"]) / "stage_0.pt"
    stage = torch.load(path, weights_only=True)
    (histories,) = [part["histories"] for parts in stage.values() for part in parts]
    assert any(one["kept"] is not None for one in histories)
    for one in histories:
        one.update(kept=None, kept_step=-1)
    torch.save(stage, path)
    wanted = fit(tmp_path / "wanted", **more)
    assert_same(found["state_dict"], wanted["state_dict"], "state_dict")

"""P6: a run that is resumed equals one that never stopped, whatever the stages and chunks are."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator
from itertools import product
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

from lightning_gnnpipe import EmbeddingRefresh, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.saving.sidecar import histories_folder
from tests.helpers.cases import slow
from tests.helpers.realistic import realistic_graph

SAVED_AT = 4
EPOCHS = 8


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Net(nn.Module):
    """Dropout, statistics over all nodes, a linear and an attentive layer, one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.GATv2Conv(5, 4, heads=2, dropout=0.1)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), gnn.GraphNorm(8)])
        self.shared = gnn.GCNConv(8, 8)
        self.last = gnn.SAGEConv(8, 3, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        for norm in self.norms:
            x = x + F.dropout(self.shared(norm(x), edge_index).relu(), 0.3, self.training)
        return self.last(x, edge_index)


class Noisy(L.LightningModule):
    """Draws from every stream of random numbers in its step, for its features as well or not."""

    def __init__(self, has_noise: bool) -> None:
        super().__init__()
        self.net, self.has_noise = Net(), has_noise
        self.losses: list[float] = []

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        x = F.dropout(data.x, 0.1) * (1 + 0.1 * noise) if self.has_noise else data.x
        out = self.net(x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        self.losses.append(loss.item())
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


class NotesKind(L.Callback):
    """Whether each step was exact."""

    def __init__(self) -> None:
        self.was_exact: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.was_exact.append(trainer.strategy.collect_stats().is_exact)


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
    """Train, save every epoch as `epoch=<n>.ckpt`, return the last checkpoint."""
    # A resumed process was started with other random numbers.
    L.seed_everything(1 if resume is None else 2, verbose=False)
    saver = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    is_one = num_inputs == 1
    options = {"num_chunks": 5, "changing_inputs": "allow" if is_one else "exact", **options}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages * options.get("graph_parallel", 1),
        precision=precision,
        strategy=GNNPipeStrategy(start_method="fork", **options),
        max_epochs=epochs,
        callbacks=[saver, StalenessWarmup(num_epochs=2), *(callbacks or [])],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    loaders = loader(num_inputs, shuffle=True), loader(num_inputs)
    trainer.fit(Noisy(has_noise=is_one), *loaders, ckpt_path=resume)
    return torch.load(folder / f"epoch={epochs - 1}.ckpt", weights_only=True)


VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "recompute": {"recompute": True},
    "bfloat16": {"history_dtype": torch.bfloat16},
    "snapshot": {"staleness": "gnnpipe"},
    "refresh": {"staleness": "constant", "callbacks": [EmbeddingRefresh(3)]},
    "constant_recompute": {"staleness": "constant", "recompute": True},
    "dropped": {"cross_chunk_edges": "drop"},
    "shards": {"graph_parallel": 2},
    "inputs": {"num_inputs": 2, "callbacks": [EmbeddingRefresh(3)]},
    "inputs_shards": {"num_inputs": 2, "graph_parallel": 2},
}


FAST = {
    *((1, name) for name in ("bfloat16", "recompute", "constant_recompute", "dropped")),
    *((1, name) for name in ("refresh", "shards")),
    (2, "snapshot"),
    (2, "inputs"),
    (3, "defaults"),
}


@pytest.mark.parametrize(
    ("num_stages", "variant"),
    [one if one in FAST else slow(*one) for one in product([1, 2, 3], VARIANTS)],
)
def test_p6_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    num_stages: int, variant: str, tmp_path: Path
) -> None:
    options = {**VARIANTS[variant], "num_stages": num_stages}
    whole = fit(tmp_path / "whole", **options)
    saved = tmp_path / "whole" / f"epoch={SAVED_AT - 1}.ckpt"
    second = fit(tmp_path / "second", resume=saved, **options)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "gnnpipe"):
        assert_same(second[name], whole[name], name)


@pytest.mark.parametrize("num_shards", [1, slow(2)])
def test_p6_in_half_precision(num_shards: int, tmp_path: Path) -> None:
    """Norms give the dtypes of the run before, in the refresh before the fifth epoch too."""
    torch.set_default_dtype(torch.float32)
    options = {
        "precision": "bf16-mixed",
        "graph_parallel": num_shards,
        "num_stages": 3 - num_shards,
        "callbacks": [EmbeddingRefresh(5)],
    }
    whole = fit(tmp_path / "whole", **options)
    saved = tmp_path / "whole" / f"epoch={SAVED_AT - 1}.ckpt"
    second = fit(tmp_path / "second", resume=saved, **options)
    assert_same(second["state_dict"], whole["state_dict"], "state_dict")


@pytest.mark.parametrize(
    ("variant", "first", "second"),
    [
        ("inputs", 2, 1),
        ("refresh", 1, 3),
        ("defaults", 2, 1),
        ("snapshot", 3, 2),
        *(slow(one, 2, 1) for one in ("refresh", "snapshot")),
        *(slow(one, 1, 3) for one in ("defaults", "snapshot", "inputs")),
        *(slow(one, 3, 2) for one in ("defaults", "refresh", "inputs")),
    ],
)
def test_p6_another_number_of_stages_goes_on_alike(
    first: int, second: int, variant: str, tmp_path: Path
) -> None:
    options = VARIANTS[variant]
    whole = fit(tmp_path / "whole", num_stages=second, **options)
    fit(tmp_path / "first", epochs=SAVED_AT, num_stages=first, **options)
    saved = tmp_path / "first" / f"epoch={SAVED_AT - 1}.ckpt"
    found = fit(tmp_path / "second", num_stages=second, resume=saved, **options)
    torch.testing.assert_close(found["state_dict"], whole["state_dict"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("variant", "is_told"), [("defaults", False), ("snapshot", True)])
def test_p6_a_run_that_goes_on_by_another_method_is_told(
    variant: str, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path / "first", epochs=SAVED_AT, num_stages=1, **VARIANTS[variant])
    saved = tmp_path / "first" / f"epoch={SAVED_AT - 1}.ckpt"
    with caplog.at_level(logging.WARNING):
        fit(tmp_path / "second", num_stages=1, resume=saved)
    assert ("staleness='gnnpipe', and this run has 'drift'" in caplog.text) == is_told


@pytest.mark.parametrize("num_chunks", [3, 7])
def test_p6_another_cut_takes_the_histories_row_by_row(num_chunks: int, tmp_path: Path) -> None:
    """The step after the resume is pipelined, on rows that the run before has written."""
    fit(tmp_path / "first", epochs=SAVED_AT)
    saved = tmp_path / "first" / f"epoch={SAVED_AT - 1}.ckpt"
    kinds = NotesKind()
    fit(
        tmp_path / "second",
        num_stages=1,
        epochs=SAVED_AT + 1,
        resume=saved,
        callbacks=[kinds],
        num_chunks=num_chunks,
        partition="random",
    )
    assert kinds.was_exact == [False]


@pytest.mark.parametrize(("first", "second"), [("keep", "drop"), ("drop", "keep")])
def test_p6_histories_of_all_edges_are_not_those_without(
    first: str, second: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"num_stages": 1, "epochs": SAVED_AT}
    fit(tmp_path / "first", cross_chunk_edges=first, **options)
    saved, kinds = tmp_path / "first" / f"epoch={SAVED_AT - 1}.ckpt", NotesKind()
    options |= {"epochs": SAVED_AT + 2, "resume": saved, "callbacks": [kinds]}
    fit(tmp_path / "second", cross_chunk_edges=second, **options)
    assert kinds.was_exact == [True, False]
    assert "has no histories of this input" in caplog.text


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
    options: dict[str, Any] = {"num_stages": 1}
    fit(tmp_path / "first", epochs=SAVED_AT, staleness="gnnpipe", **options)
    saved = tmp_path / "first" / f"epoch={SAVED_AT - 1}.ckpt"
    more = {"epochs": SAVED_AT + 4, "resume": saved, "staleness": "constant", **options}
    found = fit(tmp_path / "found", **more)
    ident = torch.load(saved, weights_only=True)["gnnpipe"]["histories"]
    path = histories_folder(saved, ident) / "stage_0.pt"
    stage = torch.load(path, weights_only=True)
    (histories,) = [part["histories"] for parts in stage.values() for part in parts]
    assert any(one["kept"] is not None for one in histories)
    for one in histories:
        one.update(kept=None, kept_step=-1)
    torch.save(stage, path)
    wanted = fit(tmp_path / "wanted", **more)
    assert_same(found["state_dict"], wanted["state_dict"], "state_dict")

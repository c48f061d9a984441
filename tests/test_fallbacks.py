"""What takes the place of what was asked for is told once: from what to what, and why."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from torch_geometric import nn as gnn

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.comm import groups as wire
from lightning_gnnpipe.models import NodeClassifier
from tests.helpers.batches import draw_batch
from tests.helpers.observed import (
    NUM_CLASSES,
    NUM_FEATURES,
    WIDTH,
    make_data,
    make_module,
    make_trainer,
)

Logs = pytest.LogCaptureFixture


def fit(
    module: L.LightningModule,
    data: Any,
    *callbacks: L.Callback,
    devices: int = 1,
    num_chunks: Any = 3,
    **options: Any,
) -> None:
    options = {"max_epochs": 4, **options}
    make_trainer(devices, num_chunks, *callbacks, **options).fit(module, data)


def told(caplog: Logs) -> list[str]:
    """Return the fallbacks that were told since the last call."""
    texts = [text for text in caplog.messages if ": from " in text]
    caplog.clear()
    return texts


class OfBatches(L.LightningModule):
    """Sees batches of graphs, and may join them."""

    def __init__(self, joins: bool = False) -> None:
        super().__init__()
        self.net, self.joins = gnn.models.GCN(NUM_FEATURES, WIDTH, 3, 1).double(), joins

    def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
        edges = data.edge_index
        if self.joins:
            edges = torch.cat([edges, torch.tensor([[0], [data.num_nodes - 1]])], 1)
        return self.net(data.x, edges).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def batches(num_graphs: int = 2) -> Any:
    return torch.utils.data.DataLoader([draw_batch([5] * num_graphs)], batch_size=None)


def before_steps(call: Callable[[L.Trainer, Any], object]) -> L.Callback:
    return LambdaCallback(on_train_batch_start=lambda trainer, module, *_: call(trainer, module))


def spoil(trainer: L.Trainer, module: Any) -> None:
    if trainer.current_epoch == 2:
        trainer.optimizers[0].param_groups[0]["lr"] = float("nan")


def freeze(trainer: L.Trainer, module: Any) -> None:
    module.net.convs[0].requires_grad_(trainer.current_epoch != 2)


def fit_nodes(*callbacks: L.Callback, **options: Any) -> None:
    fit(make_module(), make_data(), *callbacks, **options)


def fit_graphs(joins: bool = False, **options: Any) -> None:
    fit(OfBatches(joins), batches(), **options)


class TakesVector(OfBatches):
    def training_step(self, data: Any, batch_idx: int) -> torch.Tensor:
        return self.net(data.x, data.edge_index, batch=data.batch).mean()


CONSTANT = {"staleness": "constant"}
# The first words of each; what meets it, what else it says, and what has none of it.
CASES: dict[str, tuple[Callable[[], None], str, list[Callable[[], None]]]] = {
    "A batch has … graphs with nodes": (
        fit_graphs,
        "A batch has 2 graphs with nodes: from num_chunks=3 to one micro-batch",
        [lambda: fit_graphs(num_chunks=2), lambda: fit_graphs(num_chunks="auto")],
    ),
    "A batch of graphs holds one graph": (
        lambda: fit(TakesVector(), batches(1)),
        ": from chunks of a graph to one micro-batch, which overlaps with nothing. If it is",
        [lambda: fit(TakesVector(), batches(), num_chunks=2)],
    ),
    "Edges connect different graphs": (lambda: fit_graphs(True, strategy=CONSTANT), "", []),
    "No graph of a batch is cut": (
        lambda: fit_graphs(num_chunks=2, strategy={**CONSTANT, "partition": "random"}),
        ": from what partition and staleness say to micro-batches of whole graphs.",
        [],
    ),
    "The last step failed midway": (
        lambda: fit_nodes(before_steps(spoil)),
        ", or its loss or gradients were not finite",
        [fit_nodes],  # with validation after every epoch nothing is told
    ),
    "The module runs in a new mode": (
        lambda: fit_nodes(before_steps(freeze), strategy=CONSTANT),
        "(train or eval, frozen weights, options)",
        [],
    ),
    "history_dtype …": (
        lambda: fit_nodes(strategy={"history_dtype": "float16"}),
        "history_dtype torch.float16 has no room for small gradients",
        [lambda: fit_nodes(strategy={"history_dtype": "bfloat16"})],
    ),
    "… is on remote storage": (
        lambda: fit_nodes(
            ModelCheckpoint("memory://checkpoints", save_top_k=-1), enable_checkpointing=True
        ),
        "where histories are not saved: from resuming with",
        [],
    ),
}


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("words", CASES)
def test_a_fallback_is_told_once(words: str, caplog: Logs) -> None:
    run, more, quiet = CASES[words]
    run()
    [text] = told(caplog)
    assert re.match(re.escape(words).replace("…", ".+"), text) and more in text
    for other in quiet:
        other()
        assert told(caplog) == []


class OtherGraph(FullGraphDataModule):
    """Validates on other features."""

    def val_dataloader(self) -> Any:
        other = self.data.clone()
        other.x = other.x + 1
        return FullGraphDataModule(other).val_dataloader()


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("why", "options", "norm"),
    [
        ("No validation has run just before", {"limit_val_batches": 0}, None),
        ("No validation has run just before", {"check_val_every_n_epoch": 2}, None),
        ("'norms.0' normalises over all nodes", {}, "BatchNorm"),
        ("Validation may run with averages", {"callbacks": [EMAWeightAveraging(decay=0.5)]}, None),
        ("Validation is given other inputs", {"data": OtherGraph(make_data().data)}, None),
    ],
)
def test_without_rows_of_validation_it_is_told_why(
    why: str, options: dict[str, Any], norm: Any, caplog: Logs
) -> None:
    module = make_module()
    if norm:
        net = gnn.models.GCN(NUM_FEATURES, WIDTH, 3, NUM_CLASSES, norm=norm)
        module = NodeClassifier(net, NUM_CLASSES)
    options = dict(options)
    callbacks, data = options.pop("callbacks", []), options.pop("data", make_data())
    fit(copy.deepcopy(module), data, *callbacks, **options)
    [text] = told(caplog)
    assert text.startswith(why)
    assert ": from stale rows of validation to stale rows of the last step." in text
    fit(module, data, *callbacks, strategy=CONSTANT, **options)  # the remedy
    assert told(caplog) == []


def test_shards_that_do_not_wait(tmp_path: Path) -> None:
    log, handler = logging.getLogger("lightning_gnnpipe"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    try:
        strategy = {"graph_parallel": 2, "async_halo": True}
        fit_nodes(devices=2, strategy=strategy)
    finally:
        log.removeHandler(handler)
        handler.close()
    assert (tmp_path / "log").read_text().count("With async_halo shards do not wait") == 1


def test_a_graph_that_changes(caplog: Logs) -> None:
    class Two(FullGraphDataModule):
        def train_dataloader(self) -> Any:
            other = self.data.clone()
            other.edge_index = other.edge_index.flip(0)
            return torch.utils.data.DataLoader([self.data, other], batch_size=None)

    fit(make_module(), Two(make_data().data), limit_val_batches=0)
    text, *_ = told(caplog)
    assert text.startswith("'edge_index' of the pipelined module changed")
    assert "NeighborLoader" in text


def test_ranks_on_one_gpu(monkeypatch: Any, caplog: Logs) -> None:
    def gather(found: list[str], own: str) -> None:
        found[:] = [own] * len(found)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(wire, "gpu_name", lambda device: "host/0")
    found = wire.choose_wire(torch.device("cuda"), wire.GPU_BACKEND)
    assert found == torch.device("cpu")
    [text] = told(caplog)
    assert text.startswith("Ranks 0 and 1 share a GPU, which NCCL does not support: from NCCL")

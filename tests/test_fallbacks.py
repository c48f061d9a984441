"""What takes the place of what was asked for is told once: from what to what, and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch_geometric import nn as gnn

from lightning_gnnpipe.comm import groups as wire
from tests.helpers.batches import draw_batch
from tests.helpers.observed import (
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
        [fit_nodes],
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

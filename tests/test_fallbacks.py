"""Warnings of what is done instead of what was asked for come once, and say why."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
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
    """Return the warnings of fallbacks since the last call."""
    texts = [text for text in caplog.messages if any(map(partial(starts, text), CASES))]
    caplog.clear()
    return texts


def starts(text: str, words: str) -> bool:
    return re.match(re.escape(words).replace("…", ".+"), text) is not None


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

        def step(*given: Any) -> torch.Tensor:
            loss: torch.Tensor = type(module).training_step(module, *given)
            return loss + (0 * loss).sqrt()

        module.training_step = step
    elif trainer.current_epoch == 3:
        del module.training_step


def skip(trainer: L.Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
    if trainer.current_epoch == 2:
        optimizer.zero_grad()


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
    "A batch of … graphs runs in": (
        fit_graphs,
        "A batch of 2 graphs runs in 2 micro-batches, not num_chunks=3.",
        [lambda: fit_graphs(num_chunks=2), lambda: fit_graphs(num_chunks="auto")],
    ),
    "A batch of graphs holds one graph": (
        lambda: fit(TakesVector(), batches(1)),
        ": it runs in one micro-batch, which overlaps with nothing. If it is your only graph",
        [lambda: fit(TakesVector(), batches(), num_chunks=2)],
    ),
    "The batch runs as one graph": (
        lambda: fit_graphs(True, strategy=CONSTANT),
        "since edges connect its graphs",
        [],
    ),
    "Without effect on batches of graphs": (
        lambda: fit_graphs(num_chunks=2, strategy={**CONSTANT, "partition": "random"}),
        ": partition, staleness.",
        [],
    ),
    "A step runs exactly, to fill the histories anew": (
        lambda: fit_nodes(before_steps(spoil), LambdaCallback(on_before_optimizer_step=skip)),
        ", or its outputs or gradients were not finite",
        [fit_nodes],
    ),
    "A step runs exactly, to fill the histories, since the mode": (
        lambda: fit_nodes(before_steps(freeze), strategy=CONSTANT),
        "(train or eval), frozen weights or options have changed.",
        [],
    ),
    "Gradients that linear layers exchange keep": (
        lambda: fit_nodes(strategy={"history_dtype": "float16"}),
        "history_dtype=torch.float16 has no room for small ones",
        [lambda: fit_nodes(strategy={"history_dtype": "bfloat16"})],
    ),
    "A run resumed from … begins with an exact step": (
        lambda: fit_nodes(
            ModelCheckpoint("memory://checkpoints", save_top_k=-1), enable_checkpointing=True
        ),
        "since histories are not saved on remote storage.",
        [],
    ),
}


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("words", CASES)
def test_a_fallback_is_told_once(words: str, caplog: Logs) -> None:
    run, more, quiet = CASES[words]
    run()
    [text] = told(caplog)
    assert starts(text, words) and more in text
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
    words = "Messages go through the CPU by gloo, since ranks 0 and 1 share a GPU, which NCCL"
    assert sum(text.startswith(words) for text in caplog.messages) == 1

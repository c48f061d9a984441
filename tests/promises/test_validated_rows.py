"""`EmbeddingRefresh` takes a validation that has just run, and an exact pass where none has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_gnnpipe import EmbeddingRefresh, FullGraphDataModule
from lightning_gnnpipe.engine.passes import Passes
from lightning_gnnpipe.models import GNN, NodeClassifier
from tests.helpers.cases import covering, slow
from tests.helpers.graphs import communities
from tests.helpers.trainers import quiet_trainer

pytestmark = pytest.mark.usefixtures("double")


def graph() -> Data:
    generator = torch.Generator().manual_seed(0)
    data = copy.copy(communities(5).data)
    assert data.num_nodes is not None
    data.x = torch.randn(data.num_nodes, 4, generator=generator)
    data.y = torch.randint(3, (data.num_nodes,), generator=generator)
    data.train_mask = data.val_mask = data.test_mask = torch.ones(data.num_nodes, dtype=torch.bool)
    return data


class Two(FullGraphDataModule):
    """Validates on a graph of its own, or on several."""

    def __init__(self, *changes: Callable[[Data], Data]) -> None:
        super().__init__(graph())
        self.others = [FullGraphDataModule(change(graph())) for change in changes]

    def setup(self, stage: str) -> None:
        for one in (super(), *self.others):
            one.setup(stage)

    def val_dataloader(self) -> Any:
        loaders = [one.val_dataloader() for one in self.others]
        return loaders if len(loaders) > 1 else loaders[0]


def train(
    datamodule: FullGraphDataModule | None = None,
    *callbacks: L.Callback,
    resume: Path | None = None,
    num_stages: int = 1,
    num_shards: int = 1,
    **options: Any,
) -> list[Tensor]:
    """Return the weights after six epochs."""
    L.seed_everything(1, verbose=False)
    module = NodeClassifier(GNN(4, 6, 3, num_layers=3, dropout=0.5, conv="sage"), 3)
    partition = communities(5).partition
    trainer = quiet_trainer(
        num_stages * num_shards,
        {"partition": partition, "graph_parallel": num_shards},
        max_epochs=6,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        **options,
    )
    datamodule = datamodule or FullGraphDataModule(graph())
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume)
    return [one.detach() for one in module.parameters()]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def same(data: Data) -> Data:
    return data


def scaled(data: Data) -> Data:
    data.x = data.x * 100
    return data


class Normed(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(*sizes) for sizes in [(4, 6), (6, 3)])
        self.norm = norm(6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.norm(self.convs[0](x, edge_index)), edge_index)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_a_refresh_that_costs_a_forward_pass_says_so(
    norm: Callable[[int], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_epochs": 4, "callbacks": [EmbeddingRefresh(1)]}
    trainer = quiet_trainer(1, {"partition": communities(5).partition}, **options)
    trainer.fit(NodeClassifier(Normed(norm), 3), datamodule=FullGraphDataModule(graph()))
    told = [one for one in caplog.messages if "EmbeddingRefresh" in one]
    assert len(told) == (norm is nn.BatchNorm1d)
    assert not told or "since 'norm' normalises over all nodes. Leave it out" in told[0]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("num_stages", "num_shards"), [(1, 1), (2, 1), slow(1, 2)])
def test_a_refresh_changes_the_steps_and_takes_what_validation_has_computed(
    num_stages: int, num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the same features in other tensors; the steps are the same without a validation."""
    refresh = Mock(wraps=Passes.refresh)
    monkeypatch.setattr(Passes, "refresh", lambda *args: refresh(*args))
    where = {"num_stages": num_stages, "num_shards": num_shards}
    wanted = train(None, EmbeddingRefresh(1), limit_val_batches=0, **where)
    assert num_stages * num_shards > 1 or refresh.call_count == 5
    assert are_equal(train(None, EmbeddingRefresh(1), **where), wanted)
    assert are_equal(train(Two(same), EmbeddingRefresh(1), **where), wanted)
    assert num_stages * num_shards > 1 or refresh.call_count == 5
    last = train(**where)
    assert are_equal(train(limit_val_batches=0, **where), last)
    assert not are_equal(last, wanted)
    snapshot = train(None, EmbeddingRefresh(2, "snapshot"), **where)
    assert not are_equal(snapshot, wanted)
    assert not are_equal(snapshot, last)


def test_rows_of_other_features_are_not_taken() -> None:
    forced = train(None, EmbeddingRefresh(1), limit_val_batches=0)
    assert are_equal(train(Two(scaled), EmbeddingRefresh(1)), forced)


def test_rows_of_averaged_weights_are_not_taken() -> None:
    average = EMAWeightAveraging(decay=0.9)
    forced = train(None, EmbeddingRefresh(1), copy.deepcopy(average), limit_val_batches=0)
    assert are_equal(train(None, EmbeddingRefresh(1), average), forced)


def fewer_edges(data: Data) -> Data:
    assert data.edge_index is not None and data.edge_attr is not None
    data.edge_index, data.edge_attr = data.edge_index[:, :-2], data.edge_attr[:-2]
    data.edge_weight = data.edge_weight[:-2]
    return data


def own() -> FullGraphDataModule:
    return FullGraphDataModule(graph())


RUNS: dict[str, tuple[Callable[[], Any], list[L.Callback]]] = {
    "as usual": (own, []),
    "averaged weights": (own, [EMAWeightAveraging(decay=0.9)]),
    "another graph": (lambda: Two(fewer_edges), []),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("as usual", {"check_val_every_n_epoch": 2}),
        ("averaged weights", {}),
        ("another graph", {}),
    ],
)
def test_p6_a_refresh_goes_on_from_a_checkpoint_before_validation(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Lightning does not repeat the validation which would have renewed the embeddings."""
    make_data, callbacks = RUNS[name]

    def go(folder: str, resume: Path | None = None) -> list[Tensor]:
        saver = ModelCheckpoint(tmp_path / folder, "{epoch}", save_top_k=-1, every_n_train_steps=1)
        more = (EmbeddingRefresh(2), *copy.deepcopy(callbacks), saver)
        return train(make_data(), *more, resume=resume, **options)

    whole = go("whole")
    assert all(bool(one.isfinite().all()) for one in whole)
    for epoch in (0, 1, 3):
        assert are_equal(go(str(epoch), tmp_path / "whole" / f"epoch={epoch}.ckpt"), whole), epoch


class Skips(NodeClassifier):
    """Has a loss or gradients that are no numbers in step 2, and makes no step of it.

    Args:
        is_manual: Whether it goes back, and looks at the gradients, instead of at the loss.
    """

    def __init__(self, net: nn.Module, num_classes: int, *, is_manual: bool) -> None:
        super().__init__(net, num_classes)
        self.automatic_optimization = not is_manual
        self.num_lost = 0
        self.was_exact: list[bool] = []

    def training_step(self, batch: Data, batch_idx: int) -> Tensor | None:
        if self.current_epoch == 2 and self.automatic_optimization:
            batch = batch.clone()
            batch.x = batch.x.clone()
            batch.x[3] = torch.nan
        loss = super().training_step(batch, batch_idx)
        is_finite = bool(loss.isfinite())
        if self.current_epoch == 2 and is_finite:
            loss = loss + (0 * loss).sqrt()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            found = [p.grad for p in self.parameters() if p.grad is not None and p.numel()]
            is_finite = all(bool(grad.isfinite().all()) for grad in found)
            if is_finite:
                optimizer.step()
        self.num_lost += not is_finite
        return loss if is_finite and self.automatic_optimization else None

    def on_train_batch_end(self, *_: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.was_exact.append(strategy.collect_stats().is_exact)

    def on_train_end(self) -> None:
        assert self.num_lost == 1
        assert self.was_exact[3:] == [True, False, False, False, False, False]


IN_ONE = [{}, {"staleness": "constant"}, {"staleness": "gnnpipe"}]
IN_TWO = [{"num_stages": 2}, {"graph_parallel": 2}, {"graph_parallel": 2, "async_halo": True}]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("options", "is_manual", "limit_val_batches"),
    # Lightning lets one process alone return no loss.
    [*covering(IN_ONE, [False, True], [0, 1]), *covering(IN_TWO, [True], [0, 1])],
)
def test_a_step_that_is_not_finite_costs_one_step(
    options: dict[str, Any], is_manual: bool, limit_val_batches: int
) -> None:
    """As in plain training; the next one is exact."""
    module = Skips(GNN(4, 6, 3, num_layers=5, dropout=0.2, conv="sage"), 3, is_manual=is_manual)
    piped = {"partition": communities(5).partition, **options}
    num_ranks = 2 if options in IN_TWO else 1
    trainer = quiet_trainer(num_ranks, piped, max_epochs=9, limit_val_batches=limit_val_batches)
    trainer.fit(module, datamodule=own())  # it counts, on each rank

"""Tables of weights divided over shards: each has its rows, and trains them as one table."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv

from lightning_gnnpipe.steps import tables
from tests.helpers.alike import D, Fits, N, graph
from tests.helpers.cases import slow
from tests.helpers.record import as_held
from tests.helpers.trainers import quiet_trainer, weights

pytestmark = pytest.mark.usefixtures("double", "small_tables")

OTHER = graph(edge_index=graph().edge_index.flip(0)[:, ::2])
NUMBERS = itertools.count()
WARNING = "to the whole table on each shard"


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Divide tables of few rows, in forked processes too."""
    monkeypatch.setattr(tables, "LEAST_ROWS", N)
    monkeypatch.setattr(Trains, "folder", tmp_path)


class Net(nn.Module):
    """A table beside features, layers, and a skip from the table to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(N, D)
        self.convs = nn.ModuleList([GraphConv(D, D) for _ in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = x + self.emb.weight
        for conv in self.convs:
            h = conv(h, edge_index).tanh() + h
        return h


class ReadsIds(Net):
    """Its evaluation reads rows by their number, which may lie on any shard."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if not self.training:
            x = x + 0 * self.emb(torch.arange(N) * 7 % N)
        return super().forward(x, edge_index)


class Trains(Fits):
    """Writes what each rank has seen, and the rows that it holds of the table and of its states."""

    folder = Path()

    def __init__(self, make: Callable[[], nn.Module] = Net) -> None:
        super().__init__(make(), lambda net, data: net(data.x, data.edge_index))
        self.name = f"{type(self).__name__}{next(NUMBERS)}"
        self.seen: list[Tensor] = []
        self.held: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        with as_held(self.trainer):
            states = self.optimizers().state.get(self.net.emb.weight, {})  # type: ignore
            sizes = [one.size(0) for one in states.values() if torch.is_tensor(one) and one.dim()]
            self.held = [self.net.emb.weight.size(0), *sizes]

    def on_fit_end(self) -> None:
        found = (self.held, self.outputs, self.seen)
        torch.save(found, self.folder / f"{self.name}.{self.global_rank}.pt")

    def of_rank(self, rank: int = 0) -> tuple[list[int], list[Tensor], list[Tensor]]:
        """Return the rows that a rank held, its outputs of validation, and what it has seen."""
        return torch.load(self.folder / f"{self.name}.{rank}.pt")  # type: ignore


class Momentum(Trains):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Own(torch.optim.SGD):
    """An optimizer that may look at whole tensors."""


class OwnOptimizer(Trains):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Own(self.parameters(), lr=0.05)


class Decays(Trains):
    """Reads the table in the loss, before and after forward."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        before = self.net.emb.weight.square().sum() if self.current_epoch % 2 == 0 else 0
        loss = super().training_step(data, batch_idx)
        return loss + 0.01 * (before + self.net.emb.weight.abs().sum())


class Looks(Trains):
    """Keeps what hooks see of the table, its gradient and its states."""

    def on_after_backward(self) -> None:
        assert self.net.emb.weight.grad is not None
        self.seen.append(self.net.emb.weight.grad.clone())

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.net.emb.weight.detach().clone())
        state = self.optimizers().state[self.net.emb.weight]  # type: ignore
        self.seen.append(state["exp_avg"].clone())


class Validates(Trains):
    """Validates on other edges, of which shards have other nodes."""

    def validation_step(self, data: Data, batch_idx: int) -> None:
        super().validation_step(OTHER if self.current_epoch > 0 else data, batch_idx)


class TwoViews(Trains):
    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        other = graph(x=data.x * 0.5)
        both = [self.call(self.net, one) for one in (data, other)]
        return (both[0] - both[1]).square().mean() + (both[0] - 1).square().mean()


class Clips(Trains):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class RankZero(Trains):
    """Rank 0 alone reads the table, its gradient and its state, in steps of two kinds."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        loss = super().training_step(data, batch_idx)
        self.look(self.current_epoch % 2 == 1)
        return loss

    def look(self, is_time: bool) -> None:
        if self.global_rank == 0 and is_time:
            self.seen.append(self.net.emb.weight.detach().clone())

    def on_before_zero_grad(self, *_: Any) -> None:
        self.look(self.current_epoch % 2 == 0)

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self.global_rank == 0:
            assert self.net.emb.weight.grad is not None
            self.seen.append(self.net.emb.weight.grad.clone())

    def on_train_epoch_end(self) -> None:
        self.look(self.current_epoch % 2 == 0)
        if self.global_rank == 0 and self.current_epoch % 2 == 0:
            state = self.optimizers().state[self.net.emb.weight]  # type: ignore
            self.seen.append(state["exp_avg"].clone())

    def on_train_end(self) -> None:
        self.look(True)


class Thaws(Trains):
    def on_train_epoch_start(self) -> None:
        self.net.emb.weight.requires_grad_(self.current_epoch != 1)


class Loads(Trains):
    """Loads weights in the middle of training."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            found = {name: torch.ones_like(one) / 7 for name, one in self.state_dict().items()}
            self.load_state_dict(found)


def train(
    module: Trains,
    num_shards: int = 2,
    num_stages: int = 1,
    *,
    num_chunks: int = 1,
    graphs: Sequence[Data] | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Trains:
    """Train for 4 epochs; 0 shards is plain Lightning."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    piped = None
    if num_shards:
        saves_shards = options.pop("saves_shards", False)
        piped = {"num_chunks": num_chunks, "graph_parallel": num_shards, "pipelined_module": "net"}
        piped |= {"save_distributed_checkpoint": saves_shards, "recompute": num_chunks > 1}
    ranks = max(num_shards, 1) * num_stages
    options = {"max_epochs": 4, "num_sanity_val_steps": 0, **options}
    trainer = quiet_trainer(ranks, piped, **options)
    loader = DataLoader(graphs or [graph()], batch_size=None)
    trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
    return module


def assert_same(found: Trains, oracle: Trains) -> None:
    torch.testing.assert_close(weights(found), weights(oracle), rtol=0, atol=1e-10)
    pairs = zip(found.of_rank()[1:], oracle.of_rank()[1:], strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("num_shards", "num_stages"), [(2, 1), (3, 1), slow(2, 2)])
def test_each_shard_holds_its_rows(tmp_path: Path, num_shards: int, num_stages: int) -> None:
    """Of the table and of both moments; a checkpoint has all rows."""
    module = Trains()
    saving = ModelCheckpoint(tmp_path, save_last=True)
    options = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": 3}
    train(module, num_shards, num_stages, **options)
    assert_same(module, train(Trains(), 0, max_epochs=3))
    held = [module.of_rank(rank)[0] for rank in range(num_shards * num_stages)]
    first = held[:num_shards]
    assert all(len(set(one)) == 1 and len(one) == 3 for one in first)
    assert sum(one[0] for one in first) == N
    assert max(one[0] for one in first) < N
    assert all(one == [0] for one in held[num_shards:])
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    torch.testing.assert_close(saved["state_dict"]["net.emb.weight"], module.net.emb.weight)
    moments = [one["exp_avg"] for one in saved["optimizer_states"][0]["state"].values()]
    assert (N, D) in [one.shape for one in moments]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("kind", [Momentum, Decays, Loads, TwoViews, Clips, Thaws])
def test_rows_train_as_plainly(kind: type[Trains]) -> None:
    assert_same(train(kind()), train(kind(), 0))


def test_an_own_optimizer_has_whole_tables() -> None:
    found = train(OwnOptimizer())
    assert found.of_rank()[0] == [N]
    assert_same(found, train(OwnOptimizer(), 0))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"callbacks": [EMAWeightAveraging(decay=0.5)]},
        {"num_sanity_val_steps": 1},
    ],
    ids=["norm", "value", "accumulates", "averages", "validates first"],
)
def test_options_of_the_trainer_count(options: dict[str, Any]) -> None:
    found = train(Trains(), **copy.deepcopy(options))
    assert_same(found, train(Trains(), 0, **options))


@pytest.mark.parametrize("num_stages", [1, slow(2)])
def test_user_code_sees_whole_tables(num_stages: int) -> None:
    found = train(Looks(), 2, num_stages)
    assert_same(found, train(Looks(), 0))
    assert len(found.of_rank()[2]) == 12


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("saves_shards", [False, True])
def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path, saves_shards: bool) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True)
    options = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": 2}
    train(Trains(), saves_shards=saves_shards, **options)
    found = train(Trains(), ckpt_path=tmp_path / "last.ckpt", saves_shards=saves_shards)
    assert_same(found, train(Trains(), 0))


@pytest.mark.parametrize(("kind", "make"), [(Validates, Net), (Trains, ReadsIds)])
def test_other_shards_need_the_whole_table(
    kind: Any, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """One warning if it was divided before."""
    log, handler = logging.getLogger("lightning_gnnpipe"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    try:
        found = train(kind(make))
    finally:
        log.removeHandler(handler)
    assert_same(found, train(kind(make), 0))
    assert (tmp_path / "log").read_text().count(WARNING) == (kind is Validates)
    assert found.of_rank()[0] == [N] * 3


def test_in_chunks_rows_train_as_in_a_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of one run with and without division read the same stale rows."""
    found = train(Trains(), num_chunks=3)
    monkeypatch.setattr(tables, "LEAST_ROWS", N + 1)
    assert_same(found, train(Trains(), num_chunks=3))


class Keeps(Trains):
    """Keeps a graph that reads the table."""

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        loss = super().training_step(data, batch_idx)
        if self.current_epoch == 1:
            self.kept = self.net.emb.weight.abs().sum()
            return loss + 0.01 * self.kept
        return loss


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_batches", [1, 2])
def test_gradients_stay_while_tables_are_put_together(num_batches: int) -> None:
    """The second graph has other shards, when the gradient of the first is there."""
    options = {"graphs": [graph(), OTHER], "accumulate_grad_batches": num_batches}
    assert_same(train(Trains(), **options), train(Trains(), 0, **options))


def test_one_rank_reads() -> None:
    """It counts each row once in norms, and no rank waits at the end of training."""
    options = {"gradient_clip_val": 0.05}
    assert_same(train(RankZero(), **options), train(RankZero(), 0, **options))


def test_a_kept_graph_holds_no_old_shape() -> None:
    assert_same(train(Keeps()), train(Keeps(), 0))

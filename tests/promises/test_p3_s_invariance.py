"""P3: the number of stages changes no number, dropout included; nor do shards, norms included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, StalenessWarmup
from lightning_gnnpipe.comm import Collectives, Transport
from lightning_gnnpipe.models import NodeClassifier, ResGCNPlus
from lightning_gnnpipe.passing import masks
from lightning_gnnpipe.types import TrafficKind
from tests.helpers.cases import slow
from tests.helpers.graphs import communities
from tests.helpers.launch import FitResult, run_fit
from tests.helpers.modules import ReferenceModule
from tests.helpers.observed import NUM_CLASSES, NUM_FEATURES, make_data
from tests.helpers.record import assert_steps_equal
from tests.helpers.trainers import quiet_trainer

NUM_EPOCHS = 5
N, D = 60, 6


def fit(
    name: str,
    num_stages: int,
    tmp_path: Path,
    *,
    num_exact_epochs: int = 0,
    module: ReferenceModule | None = None,
    **options: Any,
) -> FitResult:
    case = communities(5)
    return run_fit(
        module or ReferenceModule(name, optimizer="adam", lr=0.01, dropout=0.5),
        case.data,
        num_stages=num_stages,
        num_chunks=case.num_chunks,
        partition=case.partition,
        callbacks=[StalenessWarmup(num_epochs=num_exact_epochs)] if num_exact_epochs else [],
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
        **options,
    )


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("name", "stages", "num_exact_epochs"),
    [
        ("gcnii", (3,), 0),
        slow("gcnii", (2, 4), 0),
        ("gat_jk", (3,), 2),
        slow("gat_jk", (2,), 2),
        slow("batch_norm", (3,), 0),
        ("edge", (2,), NUM_EPOCHS),
        ("batch_norm", (2,), 0),
    ],
)
def test_losses_do_not_depend_on_the_number_of_stages(
    name: str,
    stages: tuple[int, ...],
    num_exact_epochs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masks, "_OF_IDLE", 1e9)  # draw as many masks as may be drawn ahead
    one = fit(name, 1, tmp_path, num_exact_epochs=num_exact_epochs)
    for num_stages in stages:
        weights = {"weights": "staged" if num_stages == 3 and name == "gcnii" else "whole"}
        many = fit(
            name,
            num_stages,
            tmp_path,
            num_exact_epochs=num_exact_epochs,
            strategy_kwargs=weights,
        )
        torch.testing.assert_close(many.losses, one.losses, rtol=1e-12, atol=1e-12)
        assert_steps_equal(many.steps, one.steps)
        for key, value in one.state_dict.items():  # running statistics as well
            torch.testing.assert_close(many.state_dict[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("options", "is_ahead"), [({}, True), ({"recompute": True}, False)])
def test_masks_are_drawn_while_ranks_wait(
    options: dict[str, Any],
    is_ahead: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Those of nn.Dropout as well; where memory is to be saved, none."""
    start = masks.Masks.start

    def tell(self: masks.Masks, place: tuple[int, int], seed: int) -> None:
        start(self, place, seed)
        print("Taken:", len(self._taken), flush=True)

    monkeypatch.setattr(masks, "_OF_IDLE", 1e9)
    monkeypatch.setattr(masks.Masks, "start", tell)
    fit("gcnii", 2, tmp_path, strategy_kwargs=options)
    shown = capfd.readouterr().out
    assert ("Taken: 1" in shown) == is_ahead and ("Taken: 0" in shown) == is_ahead


def test_the_seed_alone_decides_and_dropout_differs_between_epochs(tmp_path: Path) -> None:
    first, again = fit("gcnii", 1, tmp_path), fit("gcnii", 1, tmp_path)
    assert torch.equal(first.losses, again.losses)
    assert not torch.allclose(first.losses, fit("gcnii", 1, tmp_path, seed=8).losses)
    plain = ReferenceModule("gcnii", optimizer="adam", lr=0.01)
    assert not torch.allclose(first.losses, fit("gcnii", 1, tmp_path, module=plain).losses)
    resting = ReferenceModule("gcn", optimizer="sgd", lr=0.0, dropout=0.5)
    exact = fit("gcn", 1, tmp_path, module=resting, num_exact_epochs=NUM_EPOCHS)
    assert len(set(exact.losses.tolist())) == NUM_EPOCHS


class Norms(nn.Module):
    """A message-passing layer in front of each kind of norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(D),
                gnn.BatchNorm(D),
                gnn.GraphNorm(D),
                gnn.GraphSizeNorm(),
                gnn.PairNorm(scale=3.0),
                gnn.InstanceNorm(D, affine=True, track_running_stats=True),
                gnn.MeanSubtractionNorm(),
                gnn.DiffGroupNorm(D, groups=2),
                gnn.LayerNorm(D),
            ]
        )
        # Without a bias, whose gradient is zero in front of a norm: Adam would scale up rounding.
        self.convs = nn.ModuleList([gnn.GCNConv(D, D, bias=False) for _ in self.norms])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + torch.tanh(norm(conv(x, edge_index)))
        return x


def fit_norms(
    num_chunks: int, validates: bool, *, shards: int = 1, stages: int = 1, **piped: Any
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(N, D, generator=generator, dtype=torch.float64),
        edge_index=torch.randint(0, N, (2, 4 * N), generator=generator),
        y=torch.randint(0, D, (N,), generator=generator),
    )
    L.seed_everything(1, verbose=False)
    module = NodeClassifier(Norms(), D, lr=0.05).double()
    trainer = quiet_trainer(
        shards * stages,
        {"graph_parallel": shards, "num_chunks": num_chunks, **piped},
        max_epochs=NUM_EPOCHS,
        callbacks=[StalenessWarmup(num_epochs=2)],
        limit_val_batches=1.0 if validates else 0,
    )
    trainer.fit(module, datamodule=FullGraphDataModule(data))
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("num_chunks", "validates", "where"),
    [
        slow(1, False, {"shards": 2}),
        (4, False, {"shards": 2, "recompute": True}),
        slow(4, False, {"shards": 3}),
        (4, False, {"shards": 2, "stages": 2}),
        slow(1, True, {"shards": 2}),
        (4, True, {"shards": 2}),
        slow(4, True, {"stages": 2}),
    ],
)
def test_p3_norms_see_all_shards(num_chunks: int, validates: bool, where: dict[str, Any]) -> None:
    """Validation replaces running statistics by those of an exact pass, on all ranks."""
    expected = fit_norms(num_chunks, validates)
    found = fit_norms(num_chunks, validates, **where)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=key)
    if validates and num_chunks > 1:
        left, key = fit_norms(num_chunks, False), "net.norms.5.running_mean"
        assert not torch.allclose(left[key], expected[key])


def test_statistics_of_all_norms_of_a_stage_travel_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, send = list[str](), Collectives.broadcast

    def broadcast(to: Collectives, tensor: Tensor, source: int, kind: TrafficKind) -> None:
        sent.append(kind)
        send(to, tensor, source, kind)

    def check(*_: Any) -> None:
        assert sent.count("control") == 4  # statistics and counts, of two stages

    monkeypatch.setattr(Collectives, "broadcast", broadcast)
    net = ResGCNPlus(NUM_FEATURES, 4, NUM_CLASSES, num_layers=8, norm="batch")
    watch = L.pytorch.callbacks.LambdaCallback(
        on_train_batch_start=lambda *_: sent.clear(), on_train_batch_end=check
    )
    trainer = quiet_trainer(2, {"num_chunks": 2}, max_epochs=2, callbacks=[watch])
    trainer.fit(NodeClassifier(net, NUM_CLASSES), make_data())


def test_a_norm_over_shards_sums_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one chunk: twice in forward, for the mean and about it, and once in backward."""
    sent, send = list[str](), Transport.sum_over_shards

    def add(to: Transport, tensor: Tensor, kind: TrafficKind) -> None:
        sent.append(kind)
        send(to, tensor, kind)

    def check(*_: Any) -> None:
        assert sent.count("halo") == 3 * sum(isinstance(m, nn.BatchNorm1d) for m in net.modules())

    monkeypatch.setattr(Transport, "sum_over_shards", add)
    net = ResGCNPlus(NUM_FEATURES, 4, NUM_CLASSES, num_layers=3, norm="batch")
    watch = L.pytorch.callbacks.LambdaCallback(
        on_train_batch_start=lambda *_: sent.clear(), on_train_batch_end=check
    )
    options = {"num_chunks": 1, "graph_parallel": 2}
    trainer = quiet_trainer(2, options, max_epochs=2, callbacks=[watch])
    trainer.fit(NodeClassifier(net, NUM_CLASSES), make_data())


class ChangesInPlace(nn.Module):
    """Changes in place what a norm has read."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(NUM_FEATURES, NUM_FEATURES) for _ in range(3))
        self.norm = norm

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            rows = conv(x, edge_index)
            normed = self.norm(rows)
            x = rows.mul_(2) + normed
        return x


def test_rows_may_change_after_a_mean_is_subtracted_on_shards() -> None:
    found = []
    for shards in (1, 2):
        torch.manual_seed(0)
        module = NodeClassifier(ChangesInPlace(gnn.MeanSubtractionNorm()), NUM_FEATURES, lr=0.1)
        options = {"num_chunks": 1, "graph_parallel": shards}
        trainer = quiet_trainer(shards, options, max_epochs=2)
        trainer.fit(module, make_data())
        found.append([one.detach().clone() for one in module.parameters()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)

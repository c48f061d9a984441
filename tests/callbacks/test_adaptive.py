"""Adaptive staleness acts when drift or loss ask for it, keeps its budget, and says what it did."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data

from lightning_gnnpipe import (
    AdaptiveHalo,
    AdaptiveStaleness,
    FullGraphDataModule,
    GNNPipeStrategy,
    PipelineMonitor,
    StalenessMonitor,
    StalenessWarmup,
    TimelineCallback,
)
from lightning_gnnpipe.callbacks import StalenessEvent
from lightning_gnnpipe.callbacks.adaptive import worst_chunks
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import chunk_order, plan_from_assignment
from lightning_gnnpipe.history import Staleness
from lightning_gnnpipe.models import GraphSAGE, NodeClassifier
from lightning_gnnpipe.schedule import stale_reads
from tests.helpers.observed import make_data, make_module, make_trainer

WATCHERS: dict[str, Callable[[Path], L.Callback]] = {
    "AdaptiveStaleness": lambda folder: AdaptiveStaleness(every_n_epochs=1, lead_above=1.0),
    "StalenessMonitor": lambda folder: StalenessMonitor(),
    "PipelineMonitor": lambda folder: PipelineMonitor(),
    "AdaptiveHalo": lambda folder: AdaptiveHalo(),
    "TimelineCallback": lambda folder: TimelineCallback(1, folder),
}
N, K, SEED = 40, 8, 3
ASSIGNMENT = torch.arange(N) * K // N


class Logs(L.Callback):
    """Logs a metric that has been thought up."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        module.log("watched", self.values[trainer.current_epoch], batch_size=1)


class Watches(L.Callback):
    """Writes what each epoch was like."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.was_exact: list[bool] = []
        self.was_measured: list[bool] = []
        self.pairs: list[list[tuple[int, int]]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        layers = trainer.strategy.collect_staleness()
        self.was_exact.append(trainer.strategy.collect_stats().is_exact)
        self.was_measured.append(bool(layers))
        self.pairs.append(sorted(layers[0].stale_pairs) if 0 in layers else [])

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        values = trainer.callback_metrics.items()
        self.logged.append({name: float(value) for name, value in values if "adaptive" in name})

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.folder is not None:
            adaptive = next(c for c in trainer.callbacks if isinstance(c, AdaptiveStaleness))
            found = {"state": adaptive.state_dict(), "pairs": self.pairs, "exact": self.was_exact}
            name = f"rank_{trainer.global_rank}.json"
            (self.folder / name).write_text(json.dumps({**found, "logged": self.logged}))


def graph() -> Data:
    """A ring with a few long chords: not every chunk reads every other."""
    source = torch.arange(N)
    edges = torch.stack([source, (source + 1) % N])
    chords = torch.tensor([[0, 3, 20, 33], [17, 39, 9, 2]])
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(N, 4, generator=generator),
        edge_index=torch.cat([edges, chords], dim=1),
        y=torch.randint(0, 3, (N,), generator=generator),
    )


def fit(*callbacks: L.Callback, epochs: int, num_stages: int = 1, lr: float = 0.01) -> Watches:
    """Train; return what was seen."""
    watches = next((one for one in callbacks if isinstance(one, Watches)), Watches())
    L.seed_everything(SEED, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=GNNPipeStrategy(
            partition=ASSIGNMENT, staleness="delayed", start_method="fork"
        ),  # rows that no validation renews
        max_epochs=epochs,
        callbacks=[*(one for one in callbacks if one is not watches), watches],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = NodeClassifier(GraphSAGE(4, 6, 3, num_layers=3, dropout=0.0), 3, lr=lr)
    trainer.fit(module, datamodule=FullGraphDataModule(graph()))
    return watches


def exact_epochs(callback: AdaptiveStaleness) -> list[int]:
    return [event.epoch for event in callback.events if event.action == "exact_epoch"]


def quiet(**options: Any) -> AdaptiveStaleness:
    """Return one that watches the metric of `Logs`, and hardly anything makes it act."""
    never = {"lead_above": 1e9, "max_rise": 1e9, "patience": 100, "max_exact_frac": 1.0}
    return AdaptiveStaleness(monitor="watched", **{**never, **options})


def test_a_quiet_run_does_nothing() -> None:
    """Weights stand still, so rows drift by rounding alone; the loss falls."""
    callback = AdaptiveStaleness(
        monitor="watched", every_n_epochs=1, max_drift=0.01, patience=1, max_exact_frac=1.0
    )
    seen = fit(Logs([1 / (1 + epoch) for epoch in range(8)]), callback, epochs=8, lr=0.0)
    assert callback.events == []
    assert seen.was_exact == [True] + [False] * 7
    assert seen.logged[-1] == {"adaptive/exact_epochs": 0.0, "adaptive/leading_chunks": 0.0}


def test_drift_makes_the_next_epoch_exact_and_says_why() -> None:
    """Drift is measured in epochs 1, 3 and 5; weights move fast."""
    callback = quiet(every_n_epochs=2, max_drift=0.01)
    seen = fit(Logs([1.0] * 7), callback, epochs=7, lr=0.3)
    assert seen.was_exact == [True, False, True, False, True, False, True]
    assert exact_epochs(callback) == [2, 4, 6]
    assert all(re.fullmatch(r"drift [\d.]+ is above 0\.01", e.reason) for e in callback.events)
    counts = [one["adaptive/exact_epochs"] for one in seen.logged]
    assert counts == [0, 0, 1, 1, 2, 2, 3]


def test_a_loss_that_rises_makes_the_next_epoch_exact() -> None:
    callback = quiet(max_rise=0.5)
    seen = fit(Logs([2.0, 1.0, 1.5, 1.6, 1.4, 0.9, 1.0]), callback, epochs=7)
    assert seen.was_exact == [True, False, False, False, True, False, False]
    reason = "watched 1.6 is more than 50% above its best, 1"
    assert callback.events == [StalenessEvent(4, "exact_epoch", reason)]


def test_the_rise_of_a_negative_metric_is_one_of_its_size() -> None:
    callback = quiet(max_rise=0.5)
    fit(Logs([-1.0, -0.6, -0.4, -1.0]), callback, epochs=4)
    assert exact_epochs(callback) == [3]


def test_a_loss_that_stalls_asks_for_one_exact_epoch_until_it_falls() -> None:
    callback = quiet(patience=2)
    fit(Logs([1.0] * 6 + [0.5] * 6), callback, epochs=12)
    reasons = [f"watched has not been below {best} for 2 epochs" for best in (1, 0.5)]
    assert [event.reason for event in callback.events] == reasons
    assert exact_epochs(callback) == [3, 9]


@pytest.mark.parametrize(("share", "expected"), [(0.25, [3, 7, 11]), (0.1, [9]), (0.0, [])])
def test_the_budget_is_kept(share: float, expected: list[int]) -> None:
    """The loss has risen all the time."""
    callback = quiet(max_rise=0.1, max_exact_frac=share)
    seen = fit(Logs([1.0] + [5.0] * 11), callback, epochs=12)
    assert exact_epochs(callback) == expected
    assert [e for e, is_exact in enumerate(seen.was_exact) if is_exact] == [0, *expected]
    for num_epochs in range(1, 13):
        assert sum(epoch < num_epochs for epoch in expected) <= share * num_epochs


def test_a_stall_waits_for_the_budget() -> None:
    callback = quiet(patience=2, max_exact_frac=0.125)
    fit(Logs([1.0] * 12), callback, epochs=12)
    assert exact_epochs(callback) == [7]


@pytest.mark.parametrize("is_first", [True, False])
def test_exact_epochs_of_a_warm_up_stay_and_are_not_counted(is_first: bool) -> None:
    callback = quiet(max_rise=0.1)
    both = [callback, StalenessWarmup(num_epochs=4)]
    metric = Logs([1.0, 5.0, 5.0, 5.0, 5.0, 0.9, 0.8, 0.7])
    seen = fit(metric, *(both if is_first else both[::-1]), epochs=8)
    assert seen.was_exact == [True] * 6 + [False] * 2
    assert exact_epochs(callback) == [4, 5]
    assert callback.num_exact_epochs == 2


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [StalenessMonitor, PipelineMonitor])
def test_monitors_and_adaptive_staleness_measure_side_by_side(
    kind: type[L.Callback], is_first: bool
) -> None:
    both = [quiet(every_n_epochs=3), kind(every_n_epochs=2)]
    seen = fit(Logs([1.0] * 7), *(both if is_first else both[::-1]), epochs=7)
    assert seen.was_measured == [False, True, True, True, False, True, False]


def test_the_worst_chunks_go_first_until_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks 6, 1 and 4 drift much in epoch 1, none in epoch 3; a quarter of 8 goes first."""
    drifts = [[1.0, 4.0, 1.0, 1.0, 2.5, 1.0, 9.0, 1.0], [1.0] * 8]
    used: list[tuple[int, ...]] = []

    class Notes(L.Callback):
        def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
            used.append(trainer.strategy.controls.leading_chunks)

    def collect(strategy: GNNPipeStrategy) -> dict[int, Staleness]:
        epoch = strategy.lightning_module.trainer.current_epoch
        layers = {0: Staleness(), 1: Staleness()}
        for chunk, drift in enumerate(drifts[epoch // 2 % 2]):
            layers[0].add_drift(chunk, drift**2 * 0.75, 0.5)
            layers[1].add_drift(chunk, drift**2 * 0.25, 0.5)
        return layers

    monkeypatch.setattr(GNNPipeStrategy, "collect_staleness", collect)
    callback = quiet(every_n_epochs=2, lead_above=2)
    seen = fit(Logs([1.0] * 5), callback, Notes(), epochs=5)
    assert used == [(), (), (6, 1), (6, 1), ()]
    assert [one["adaptive/leading_chunks"] for one in seen.logged] == [0, 0, 2, 2, 0]
    above = "drift above 2, with a median of 1: "
    assert callback.events == [
        StalenessEvent(1, "leading_chunks", above + "6: 9, 1: 4", (6, 1)),
        StalenessEvent(3, "leading_chunks", above + "none", ()),
    ]


def test_the_worst_chunks_are_a_quarter_at_most() -> None:
    drift = {0: 1.0, 1: 3.0, 2: 3.0, 3: 5.0, 4: 1.0, 5: 1.0, 6: 1.0, 7: 2.0}
    assert worst_chunks(drift, 1.5) == (3, 1)
    assert worst_chunks(drift, 4.0) == (3,)
    assert worst_chunks(drift, 5.0) == ()
    assert worst_chunks({0: 1.0, 1: 2.0, 2: 9.0}, 1.0) == ()


def test_two_ranks_do_the_same_and_read_what_the_simulator_says(tmp_path: Path) -> None:
    """P8, with chunks that go first because they have drifted."""
    callback = quiet(every_n_epochs=1, lead_above=1.0, max_rise=0.1, max_exact_frac=0.3)
    metric = Logs([1.0] + [5.0] * 7)
    fit(metric, callback, StalenessMonitor(), Watches(tmp_path), epochs=8, num_stages=2, lr=0.1)
    first, second = (json.loads((tmp_path / f"rank_{r}.json").read_text()) for r in range(2))
    assert first == second
    sources = plan_from_assignment(graph().edge_index, N, ASSIGNMENT).sources
    state, leading = first["state"], dict.fromkeys(range(9), ())
    for event in state["events"]:
        if event["action"] == "leading_chunks":
            leading |= dict.fromkeys(range(event["epoch"] + 1, 9), tuple(event["chunks"]))
    assert len(set(leading.values())) > 2, "hardly any chunk was ever the worst"
    assert [e["epoch"] for e in state["events"] if e["action"] == "exact_epoch"] == [3, 6]
    for epoch, (pairs, is_exact) in enumerate(zip(first["pairs"], first["exact"], strict=True)):
        lead = leading[epoch]
        order = chunk_order(K, epoch=epoch, seed=SEED, order="shuffled", leading=lead)
        expected = [] if is_exact else sorted(map(list, stale_reads(order, sources)))
        assert pairs == expected
        assert first["logged"][epoch]["adaptive/leading_chunks"] == len(lead)


def test_a_metric_that_nobody_logs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'watched' to be logged.*train_loss.*AdaptiveStaleness"):
        fit(quiet(), epochs=2)


def test_a_run_ends_with_one_line_of_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit(Logs([1.0, 5.0, 1.0, 0.9]), quiet(max_rise=0.1), epochs=4)
    assert (
        "AdaptiveStaleness: made 1 of 4 epochs exact (the last, 2: watched 5 is more than 10% "
        "above its best, 1); changed the leading chunks 0 times, now []."
    ) in caplog.text


@pytest.mark.parametrize("name", WATCHERS)
def test_a_run_resumed_from_a_checkpoint_of_validation_skips_the_end_of_that_epoch(
    name: str, tmp_path: Path
) -> None:
    """Its epoch has not ended, and there is no step to measure when it does."""
    make = WATCHERS[name]
    saver = ModelCheckpoint(
        tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=False
    )
    options: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True}
    trainer = make_trainer(1, 4, make(tmp_path), saver, **options)
    trainer.fit(make_module(), make_data())
    second = make(tmp_path)
    trainer = make_trainer(1, 4, second, max_epochs=4)
    trainer.fit(make_module(), make_data(), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert trainer.current_epoch == 4
    if isinstance(second, AdaptiveStaleness):
        assert all(event.epoch > 1 for event in second.events)

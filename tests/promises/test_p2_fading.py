"""P2 for damping that fades with the learning rate: steps equal the oracle's at every rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from lightning_gnnpipe import (
    DelayedGradients,
    FullGraphDataModule,
    GNNPipeStrategy,
    LastRows,
    StalenessMethod,
)
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.models import NodeClassifier
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.launch import SEED, run_fit
from tests.helpers.modules import NETS, NUM_FEATURES, ReferenceModule
from tests.helpers.record import assert_steps_equal
from tests.helpers.reference import Delay
from tests.helpers.training import Refresh, train_with_oracle

LR = 0.05
# By step: the rate in shares of LR; the quarters of the largest so far, worked out by hand.
RATES = (0.5, 0.8, 1.0, 0.9, 0.7, 0.55, 0.3, 0.05, 0.6, 0.0)
QUARTERS = (4, 4, 4, 4, 3, 2, 1, 0, 2, 0)
RULE = DelayedGradients(decay=0.5, scale=1.5, fades=True)


class FallingModule(ReferenceModule):
    """Its learning rate is another one in each step."""

    def configure_optimizers(self) -> Any:
        self.made = super().configure_optimizers()
        return {"optimizer": self.made, "lr_scheduler": LambdaLR(self.made, RATES.__getitem__)}


class OracleModule(ReferenceModule):
    """Likewise, but the rates are set by the test."""

    def configure_optimizers(self) -> Any:
        self.made = super().configure_optimizers()
        return self.made


def factors_of(step: int, rule: DelayedGradients) -> tuple[float, float]:
    """Return decay and scale of a step."""
    share = QUARTERS[step] / 4
    return 1 - share * (1 - rule.decay), 1 - share * (1 - rule.scale)


def assert_equals_oracle(
    tmp_path: Path,
    *,
    name: str,
    rule: DelayedGradients = RULE,
    case: GraphCase | None = None,
    recompute: bool = False,
    **ranks: int,
) -> None:
    case, num_epochs = case or communities(5), len(RATES) - 1  # Lightning asks for one rate more
    found = run_fit(
        FallingModule(name, optimizer="momentum", lr=LR),
        case.data,
        num_chunks=case.num_chunks,
        partition=case.partition,
        max_epochs=num_epochs,
        tmp_path=tmp_path,
        trainer_kwargs={"limit_val_batches": 0},
        strategy_kwargs={
            "staleness": StalenessMethod(rule, LastRows()),
            "recompute": recompute,
        },
        **{"num_stages": 1, **ranks},
    )
    oracle, delay = OracleModule(name, optimizer="momentum", lr=LR), Delay(1.0)

    def begin(step: int) -> float:
        for group in oracle.made.param_groups:
            group["lr"] = LR * RATES[step]
        made_with, _ = factors_of(step - 1, rule)  # what waits
        delay.decay = made_with
        return factors_of(step, rule)[1]

    expected = train_with_oracle(
        oracle,
        case.data,
        case.partition,
        orders=lambda epoch: chunk_order(case.num_chunks, epoch=epoch, seed=SEED, order="shuffled"),
        refresh=Refresh(),
        num_epochs=num_epochs,
        cross_chunk_grad_scale=begin,
        delay=delay,
    )
    assert_steps_equal(found.steps, expected)


@pytest.mark.parametrize("name", NETS)
def test_one_stage_equals_oracle(name: str, tmp_path: Path) -> None:
    assert_equals_oracle(tmp_path, name=name)


@pytest.mark.parametrize("name", ["gcn", "edge"])
@pytest.mark.parametrize(
    "rule",
    [
        DelayedGradients(decay=0.25, scale=1.0, fades=True),
        DelayedGradients(decay=1.0, scale=2.0, fades=True),
    ],
    ids=["decay", "scale"],
)
def test_other_rules_equal_oracle(rule: DelayedGradients, name: str, tmp_path: Path) -> None:
    assert_equals_oracle(tmp_path, name=name, rule=rule)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_one_stage_equals_oracle_on(case: GraphCase, tmp_path: Path) -> None:
    assert_equals_oracle(tmp_path, name="sage", case=case)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "recompute"),
    [("gcnii", 2, 1, False), ("edge", 2, 1, True), ("gcn", 1, 2, True), ("sage", 2, 2, False)],
)
def test_stages_shards_and_recomputing_equal_oracle(
    name: str, num_stages: int, num_shards: int, recompute: bool, tmp_path: Path
) -> None:
    assert_equals_oracle(
        tmp_path, name=name, num_stages=num_stages, num_shards=num_shards, recompute=recompute
    )


def test_the_test_can_fail(tmp_path: Path) -> None:
    """Without fading the same run is another one, and its weights are those of damped gradients."""
    steady = DelayedGradients(decay=0.5, scale=1.5)
    with pytest.raises(AssertionError, match="in step"):
        assert_equals_oracle(tmp_path, name="gcn", rule=steady)


class Scales(L.Callback):
    """Notes the factor on gradients of fresh rows in each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, GNNPipeStrategy)
        graph = trainer.strategy.engine.graphs.trained
        assert graph is not None
        self.found.append(RULE.at_rate(graph.store.rate_share).scale)


class WithHead(NodeClassifier):
    """Has a layer outside of the pipeline, the rate of which does not fall; or no rates at all."""

    def __init__(self, *, has_rates: bool) -> None:
        super().__init__(GCN(NUM_FEATURES, 4, 2, 4), 4)
        self.head = nn.Linear(4, 4)
        self.has_rates = has_rates
        self.double()

    def forward(self, data: Data) -> Tensor:
        return self.head(self.net(data.x, data.edge_index))

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net.parameters()}, {"params": self.head.parameters(), "lr": 0.1}]
        if not self.has_rates:
            return NoRate(groups, lr=0.1)
        optimizer = torch.optim.SGD(groups, lr=0.1)
        falls = LambdaLR(optimizer, [lambda step: 0.5**step, lambda _: 1.0])
        return {"optimizer": optimizer, "lr_scheduler": falls}


class NoRate(torch.optim.SGD):
    """Chooses its rate by itself, in the step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = None
        loss = closure()
        for group in self.param_groups:
            group["lr"] = 0.1
        return super().step(lambda: loss)


@pytest.mark.parametrize(
    ("has_rates", "expected"), [(True, [1.5, 1.25, 1.125, 1.0]), (False, [1.5] * 4)]
)
def test_rates_of_the_pipelined_module_count(has_rates: bool, expected: list[float]) -> None:
    """Not those of other layers; an optimizer may have none."""
    case, scales = communities(5), Scales()
    data = case.data.clone()
    mask = torch.ones(case.partition.numel(), dtype=torch.bool)
    data.y = torch.arange(len(mask)) % 4
    data.train_mask = data.val_mask = mask
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=GNNPipeStrategy(partition=case.partition),
        callbacks=[scales],
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(WithHead(has_rates=has_rates), datamodule=FullGraphDataModule(data))
    assert scales.found == expected


def test_where_nothing_falls_it_is_the_rule_itself() -> None:
    assert RULE.at_rate(1.0) == RULE
    nothing_damped = RULE.at_rate(0.0)
    assert (nothing_damped.decay, nothing_damped.scale) == (1.0, 1.0)
    assert RULE.scales == (1.0, 1.125, 1.25, 1.375, 1.5)
    steady = DelayedGradients(decay=0.5, scale=1.5)
    assert steady.at_rate(0.0) is steady and steady.scales == (1.5,)
    assert RULE.at_rate(0.6).decay == 0.75


def test_what_cannot_fade_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'decay' .* to be above 0 if it fades"):
        DelayedGradients(decay=0.0, fades=True)

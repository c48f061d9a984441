"""P2 for the strategy as it comes: damping that fades, weights carried forward, validated rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.graph import chunk_order
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.launch import SEED, run_fit
from tests.helpers.modules import NETS
from tests.helpers.record import assert_steps_equal
from tests.helpers.reference import Delay, KnownNoise
from tests.helpers.training import Refresh, train_with_oracle
from tests.promises.test_p2_fading import LR, QUARTERS, RATES, FallingModule, OracleModule

NUM_EPOCHS = len(RATES) - 1  # Lightning asks for one rate more
DECAY, SCALE, NOISE, LOOKAHEAD = 0.5, 1.5, 0.7, 4


@dataclass(frozen=True)
class Validated(Refresh):
    """Rows are renewed by the validation after each step; some later step is exact as well."""

    exact_epoch: int = 0

    def is_exact(self, epoch: int) -> bool:
        return epoch in (0, self.exact_epoch)

    def recomputes_before(self, epoch: int) -> bool:
        return epoch > 0


@dataclass
class OneExact(L.Callback):
    """Has one epoch more run by the exact schedule."""

    epoch: int

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, GNNPipeStrategy)
        trainer.strategy.controls.is_exact = trainer.current_epoch == self.epoch


def assert_equals_oracle(
    tmp_path: Path,
    name: str,
    *,
    case: GraphCase | None = None,
    exact_epoch: int = 0,
    share: float = NOISE,
    lookahead: int = LOOKAHEAD,
    num_stages: int = 1,
    num_shards: int = 1,
    **options: Any,
) -> None:
    case = case or communities(5)
    fit = run_fit(
        FallingModule(name, optimizer="momentum", lr=LR),
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=case.num_chunks,
        partition=case.partition,
        callbacks=[OneExact(exact_epoch)],
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
        trainer_kwargs={"limit_val_batches": 1.0},
        strategy_kwargs=options,
    )
    oracle, delay = OracleModule(name, optimizer="momentum", lr=LR), Delay(1.0)

    def begin(step: int) -> float:
        for group in oracle.made.param_groups:
            group["lr"] = LR * RATES[step]
        delay.decay = 1 - QUARTERS[step - 1] / 4 * (1 - DECAY)  # of the step that made what waits
        return 1 - QUARTERS[step] / 4 * (1 - SCALE)

    expected = train_with_oracle(
        oracle,
        case.data,
        case.partition,
        orders=lambda epoch: chunk_order(case.num_chunks, epoch=epoch, seed=SEED, order="shuffled"),
        refresh=Validated(how="exact", exact_epoch=exact_epoch),
        num_epochs=NUM_EPOCHS,
        cross_chunk_grad_scale=begin,
        delay=delay,
        foresight=KnownNoise(share),
        lookahead=lookahead,
    )
    assert_steps_equal(fit.steps, expected)


@pytest.mark.parametrize("name", NETS)
def test_one_stage_equals_oracle(name: str, tmp_path: Path) -> None:
    assert_equals_oracle(tmp_path, name)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_one_stage_equals_oracle_on(case: GraphCase, tmp_path: Path) -> None:
    assert_equals_oracle(tmp_path, "sage", case=case)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "options"),
    [
        ("gcnii", 2, 1, {}),
        ("edge", 3, 1, {"recompute": True}),
        ("gat_jk", 1, 2, {}),
        ("gcn", 2, 2, {"recompute": True}),
    ],
)
def test_stages_shards_and_recomputing_equal_oracle(
    name: str, num_stages: int, num_shards: int, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_equals_oracle(tmp_path, name, num_stages=num_stages, num_shards=num_shards, **options)


@pytest.mark.parametrize(
    ("exact_epoch", "num_stages", "num_shards"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (4, 1, 2)]
)
def test_an_exact_step_amid_others_equals_oracle(
    exact_epoch: int, num_stages: int, num_shards: int, tmp_path: Path
) -> None:
    """It drops what waits and what weights are carried by; step 2 has the largest rate of all."""
    assert_equals_oracle(
        tmp_path,
        "masked",
        exact_epoch=exact_epoch,
        num_stages=num_stages,
        num_shards=num_shards,
    )


@pytest.mark.parametrize("part", [{"share": 0.6}, {"lookahead": 3}], ids=str)
def test_each_part_is_told_apart(part: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="in step"):
        assert_equals_oracle(tmp_path, "masked", **part)

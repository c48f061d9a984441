"""P2 for gradients by one of two rules: they equal the oracle's before rules change and after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gnnpipe import AdaptiveGradients, DelayedGradients, LastRows, StalenessMethod
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.history.adaptive import EVERY_N_STEPS
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.launch import SEED, FitResult, run_fit
from tests.helpers.modules import NETS, ReferenceModule
from tests.helpers.record import assert_steps_equal
from tests.helpers.reference import Delay
from tests.helpers.training import Refresh, train_with_oracle

NUM_EPOCHS = 2 * EVERY_N_STEPS + 2
ALWAYS_NOISY, ALWAYS_STEADY = 2.0, -1.0  # no correlation is above the one or below the other
# Linear layers, with a threshold of which 0.85 is above some layers' correlation and below others'.
LINEAR = {"gcn": 1.05, "sage": 1.16, "gcnii": 1.05}
OPTIMIZER = {"optimizer": "momentum", "lr": 0.05}


def fit(
    name: str,
    threshold: float,
    tmp_path: Path,
    *,
    num_stages: int = 1,
    num_shards: int = 1,
    recompute: bool = False,
    case: GraphCase | None = None,
) -> FitResult:
    case = case or communities(5)
    rules = AdaptiveGradients(threshold=threshold)
    return run_fit(
        ReferenceModule(name, **OPTIMIZER),
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=case.num_chunks,
        partition=case.partition,
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
        trainer_kwargs={"limit_val_batches": 0},
        strategy_kwargs={
            "staleness": StalenessMethod(rules, LastRows()),
            "recompute": recompute,
        },
    )


def rule_of(step: int, name: str, threshold: float) -> DelayedGradients:
    """Return the rule of a step: the first measured one is number `EVERY_N_STEPS`."""
    rules = AdaptiveGradients()
    is_noisy = name in LINEAR and threshold == ALWAYS_NOISY and step > EVERY_N_STEPS
    return rules.noisy if is_noisy else rules.steady


def assert_equals_oracle(
    found: FitResult, name: str, threshold: float, case: GraphCase | None = None
) -> None:
    case, delay = case or communities(5), Delay(1.0)
    oracle = ReferenceModule(name, **OPTIMIZER)

    def begin(step: int) -> float:
        made_by = rule_of(step - 1, name, threshold)  # what waits
        delay.decay, delay.lead = made_by.decay, made_by.lead
        return rule_of(step, name, threshold).scale

    expected = train_with_oracle(
        oracle,
        case.data,
        case.partition,
        orders=lambda epoch: chunk_order(case.num_chunks, epoch=epoch, seed=SEED, order="shuffled"),
        refresh=Refresh(),
        num_epochs=NUM_EPOCHS,
        cross_chunk_grad_scale=begin,
        delay=delay,
    )
    assert_steps_equal(found.steps, expected)


@pytest.mark.parametrize("threshold", [ALWAYS_NOISY, ALWAYS_STEADY])
@pytest.mark.parametrize("name", NETS)
def test_one_stage_equals_oracle(name: str, threshold: float, tmp_path: Path) -> None:
    assert_equals_oracle(fit(name, threshold, tmp_path), name, threshold)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "recompute"),
    [("gcnii", 2, 1, False), ("edge", 2, 1, True), ("gcn", 1, 2, True), ("sage", 2, 2, False)],
)
def test_stages_shards_and_recomputing_equal_oracle(
    name: str, num_stages: int, num_shards: int, recompute: bool, tmp_path: Path
) -> None:
    found = fit(
        name,
        ALWAYS_NOISY,
        tmp_path,
        num_stages=num_stages,
        num_shards=num_shards,
        recompute=recompute,
    )
    assert_equals_oracle(found, name, ALWAYS_NOISY)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_shards_without_a_row_of_a_chunk_equal_oracle(case: GraphCase, tmp_path: Path) -> None:
    """Chunks of one node, or of no edge."""
    found = fit("gcn", ALWAYS_NOISY, tmp_path, num_shards=2, case=case)
    assert_equals_oracle(found, "gcn", ALWAYS_NOISY, case)


@pytest.mark.parametrize(("num_stages", "num_shards"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", LINEAR)
def test_ranks_measure_what_one_process_does(
    name: str, num_stages: int, num_shards: int, tmp_path: Path
) -> None:
    alone = fit(name, LINEAR[name], tmp_path)
    for other in (ALWAYS_NOISY, ALWAYS_STEADY):
        with pytest.raises(AssertionError):
            assert_steps_equal(alone.steps, fit(name, other, tmp_path).steps)
    found = fit(name, LINEAR[name], tmp_path, num_stages=num_stages, num_shards=num_shards)
    assert_steps_equal(found.steps, alone.steps)
    torch.testing.assert_close(found.losses, alone.losses, rtol=1e-12, atol=1e-12)

"""P2 for what stale reads return: renewed rows with noise equal the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_gnnpipe import (
    DelayedGradients,
    DroppedGradients,
    LastRows,
    RenewedRows,
    StalenessMethod,
)
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.history.reads import ReadRule
from tests.helpers.graphs import communities
from tests.helpers.launch import SEED, run_fit
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import Step, assert_steps_equal
from tests.helpers.reference import Delay, KnownNoise
from tests.helpers.training import Refresh, train_with_oracle
from tests.promises.test_p2_stale_gradient import OPTIMIZER, RULES, callbacks

NUM_EPOCHS = 6
RENEWED = {
    "each": (1, 1.0),
    "each_half": (1, 0.5),
    "second": (2, 1.0),
    "second_part": (2, 0.7),
}


def assert_equals_oracle(
    tmp_path: Path,
    name: str,
    reads: tuple[ReadRule, KnownNoise],
    *,
    rule: str = "live",
    num_stages: int = 1,
    num_shards: int = 1,
    is_delayed: bool = False,
    extra: list[Any] | None = None,
    refresh: Refresh | None = None,
    **options: Any,
) -> None:
    case = communities(5)
    read_rule, foresight = reads
    oracle = ReferenceModule(name, **OPTIMIZER)
    expected = train_with_oracle(
        oracle,
        case.data,
        case.partition,
        orders=lambda epoch: chunk_order(5, epoch=epoch, seed=SEED, order="shuffled"),
        refresh=refresh or RULES[rule],
        num_epochs=NUM_EPOCHS,
        delay=Delay(0.5) if is_delayed else None,
        foresight=foresight,
    )
    gradients = DelayedGradients(0.5) if is_delayed else DroppedGradients()
    fit = run_fit(
        ReferenceModule(name, **OPTIMIZER),
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=5,
        partition=case.partition,
        callbacks=[*callbacks(rule), *(extra or [])],
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
        strategy_kwargs={"staleness": StalenessMethod(gradients, read_rule), **options},
    )
    assert_steps_equal(fit.steps, expected)


@pytest.mark.parametrize(
    ("renewed", "num_stages", "num_shards", "options"),
    [
        ("each", 1, 1, {}),
        ("each_half", 1, 1, {"recompute": True}),
        ("second", 1, 1, {}),
        ("second_part", 1, 1, {"rule": "warmup"}),
        ("each", 2, 1, {"rule": "warmup"}),
        ("each", 1, 2, {}),
        ("second", 2, 1, {"is_delayed": True, "recompute": True}),
    ],
)
def test_renewed_rows_have_the_noise_of_training(
    renewed: str, num_stages: int, num_shards: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """A network that is otherwise in training than in validation, and in the oracle as well."""
    every_n_steps, share = RENEWED[renewed]
    assert_equals_oracle(
        tmp_path,
        "masked",
        (RenewedRows(every_n_steps, noise=share), KnownNoise(share)),
        num_stages=num_stages,
        num_shards=num_shards,
        refresh=Refresh(
            RULES[options.get("rule", "live")].num_exact_epochs, every_n_steps, how="exact"
        ),
        **options,
    )


def validated(
    reads: ReadRule, batches: float, folder: Path, num_stages: int, num_shards: int
) -> list[Step]:
    """Return the steps of a run that validates on so many batches, or so large a share."""
    case = communities(5)
    return run_fit(
        ReferenceModule("gcnii", **OPTIMIZER),
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=5,
        partition=case.partition,
        max_epochs=NUM_EPOCHS,
        tmp_path=folder,
        trainer_kwargs={"limit_val_batches": batches},
        strategy_kwargs={"staleness": StalenessMethod(reads=reads)},
    ).steps


@pytest.mark.parametrize(("num_stages", "num_shards"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_validation_saves_the_pass_that_renews_rows(
    every_n_steps: int, num_stages: int, num_shards: int, tmp_path: Path
) -> None:
    """The steps are the same with validation and without; with it, no other pass is made."""
    from lightning_gnnpipe.engine.graph_passes import GraphPasses

    passes: list[bool] = []
    refresh = GraphPasses.refresh
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphPasses, "refresh", lambda *args: (passes.append(True), refresh(*args)))
        for batches in (0, 1.0):
            passes.clear()
            rows = RenewedRows(every_n_steps)
            steps.append(validated(rows, batches, tmp_path, num_stages, num_shards))
            if num_stages * num_shards == 1:  # otherwise they are made in other processes
                assert len(passes) == (0 if batches else (NUM_EPOCHS - 1) // every_n_steps)
    assert_steps_equal(steps[1], steps[0])


@pytest.mark.parametrize(("num_stages", "num_shards"), [(1, 1), (2, 1), (1, 2)])
def test_rows_of_validation_may_be_taken_where_there_are_some(
    num_stages: int, num_shards: int, tmp_path: Path
) -> None:
    """Without validation they are the last ones, with it those of a pass before every step."""
    steps = {
        (reads, batches): validated(reads, batches, tmp_path, num_stages, num_shards)
        for reads, batches in (
            (RenewedRows(None), 0),
            (LastRows(), 0),
            (RenewedRows(None), 1.0),
            (RenewedRows(1), 0),
        )
    }
    assert_steps_equal(steps[RenewedRows(None), 0], steps[LastRows(), 0])
    assert_steps_equal(steps[RenewedRows(None), 1.0], steps[RenewedRows(1), 0])
    assert steps[LastRows(), 0][-1].loss != steps[RenewedRows(1), 0][-1].loss

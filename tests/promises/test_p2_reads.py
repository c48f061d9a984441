"""Rows of validation take the place of an exact pass before each step."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gnnpipe import EmbeddingRefresh
from lightning_gnnpipe.engine.passes import GraphPasses
from lightning_gnnpipe.staleness import StalenessMethod
from tests.helpers.cases import slow
from tests.helpers.graphs import communities
from tests.helpers.launch import run_fit
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import Step, assert_steps_equal
from tests.promises.test_p2_stale_gradient import OPTIMIZER

NUM_EPOCHS = 6


def train(
    folder: Path,
    num_stages: int,
    num_shards: int,
    *,
    takes: bool = False,
    refreshes: bool = False,
    batches: float = 0,
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
        callbacks=[EmbeddingRefresh(1)] if refreshes else [],
        max_epochs=NUM_EPOCHS,
        tmp_path=folder,
        trainer_kwargs={"limit_val_batches": batches},
        method=StalenessMethod(takes_validation=takes),
    ).steps


@pytest.mark.parametrize(("num_stages", "num_shards"), [(1, 1), (2, 1), slow(1, 2)])
def test_rows_of_validation_are_taken_where_there_are_some(
    num_stages: int, num_shards: int, tmp_path: Path
) -> None:
    """Without validation they are the last ones, with it those of a pass before every step."""
    where = tmp_path, num_stages, num_shards
    last, renewed = train(*where), train(*where, refreshes=True)
    assert_steps_equal(train(*where, takes=True), last)
    assert_steps_equal(train(*where, takes=True, batches=1.0), renewed)
    assert last[-1].loss != renewed[-1].loss


def test_validation_saves_the_pass_that_renews_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are the same with validation and without; with it, no other pass is made."""
    passes: list[bool] = []
    refresh = GraphPasses.refresh
    monkeypatch.setattr(GraphPasses, "refresh", lambda *args: (passes.append(True), refresh(*args)))
    steps = []
    for batches, num_passes in ((0, NUM_EPOCHS - 1), (1.0, 0)):
        passes.clear()
        steps.append(train(tmp_path, 1, 1, takes=True, refreshes=True, batches=batches))
        assert len(passes) == num_passes
    assert_steps_equal(steps[1], steps[0])

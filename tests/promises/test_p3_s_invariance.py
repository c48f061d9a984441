"""P3: the number of stages changes no number, dropout included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cases import slow
from tests.helpers.graphs import communities
from tests.helpers.launch import FitResult, run_fit
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import assert_steps_equal

NUM_EPOCHS = 5


def fit(
    name: str,
    num_stages: int,
    tmp_path: Path,
    *,
    dropout: float = 0.5,
    num_exact_epochs: int = 0,
    **options: Any,
) -> FitResult:
    from lightning_gnnpipe import StalenessWarmup

    case = communities(5)
    return run_fit(
        ReferenceModule(name, optimizer="adam", lr=0.01, dropout=dropout),
        case.data,
        num_stages=num_stages,
        num_chunks=case.num_chunks,
        partition=case.partition,
        callbacks=[StalenessWarmup(num_epochs=num_exact_epochs)] if num_exact_epochs else [],
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
        **options,
    )


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
    name: str, stages: tuple[int, ...], num_exact_epochs: int, tmp_path: Path
) -> None:
    one = fit(name, 1, tmp_path, num_exact_epochs=num_exact_epochs)
    for num_stages in stages:
        many = fit(name, num_stages, tmp_path, num_exact_epochs=num_exact_epochs)
        torch.testing.assert_close(many.losses, one.losses, rtol=1e-12, atol=1e-12)
        assert_steps_equal(many.steps, one.steps)
        for key, value in one.state_dict.items():  # running statistics as well
            torch.testing.assert_close(many.state_dict[key], value, rtol=1e-10, atol=1e-10)


def test_the_seed_alone_decides(tmp_path: Path) -> None:
    first, again = fit("gcnii", 1, tmp_path), fit("gcnii", 1, tmp_path)
    assert torch.equal(first.losses, again.losses)
    assert not torch.allclose(first.losses, fit("gcnii", 1, tmp_path, seed=8).losses)
    assert not torch.allclose(first.losses, fit("gcnii", 1, tmp_path, dropout=0.0).losses)


def test_dropout_differs_between_epochs(tmp_path: Path) -> None:
    case = communities(5)
    result = run_fit(
        ReferenceModule("gcn", optimizer="sgd", lr=0.0, dropout=0.5),
        case.data,
        num_stages=1,
        num_chunks=1,
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
    )
    assert len(set(result.losses.tolist())) == NUM_EPOCHS

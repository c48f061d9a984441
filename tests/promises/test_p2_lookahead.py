"""P2 for weights that are carried forward: steps equal the oracle's, on every path they take."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lightning_gnnpipe import StalenessMethod
from lightning_gnnpipe.errors import ConfigError
from tests.helpers import training
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.lookahead import Lookahead
from tests.helpers.modules import NETS
from tests.promises.test_p2_stale_gradient import NUM_EPOCHS, RULES, assert_equals_oracle

DELAY = 0.75


@pytest.mark.parametrize("delay", [None, 1.0, DELAY], ids=["dropped", "late", "damped"])
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@pytest.mark.parametrize("name", NETS)
def test_one_stage_equals_oracle(
    name: str, num_chunks: int, delay: float | None, tmp_path: Path
) -> None:
    case = communities(num_chunks)
    assert_equals_oracle(case, tmp_path, name=name, delay=delay, lookahead=2)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_one_stage_equals_oracle_on(case: GraphCase, tmp_path: Path) -> None:
    assert_equals_oracle(case, tmp_path, name="sage", delay=DELAY, scale=1.25, lookahead=3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("validate", [False, True])
def test_renewed_rows_are_of_the_weights_themselves(
    rule: str, validate: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"rule": rule, "validate": validate, "lookahead": 4}
    assert_equals_oracle(communities(5), tmp_path, name="gcnii", delay=DELAY, **options)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "options"),
    [
        ("gcnii", 2, 1, {}),
        ("gcn", 4, 1, {"recompute": True}),
        ("gat_jk", 3, 1, {}),
        ("gcnii", 3, 1, {"repeat_encoder": True}),
        ("edge", 1, 1, {"recompute": True, "optimizer": "adam"}),
        ("sage", 1, 2, {}),
        ("edge", 2, 2, {}),
    ],
)
def test_stages_shards_and_recomputing_equal_oracle(
    name: str, num_stages: int, num_shards: int, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_equals_oracle(
        communities(5),
        tmp_path,
        name=name,
        num_stages=num_stages,
        num_shards=num_shards,
        delay=DELAY,
        lookahead=2,
        **options,
    )


def test_weights_of_the_oracle_are_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than the last step, in most parameters; from the third step in chunks."""
    made: list[Lookahead] = []
    monkeypatch.setattr(
        training, "Lookahead", lambda *args: made.append(Lookahead(*args)) or made[0]
    )
    assert_equals_oracle(communities(5), tmp_path, name="gcnii", delay=DELAY, lookahead=4)
    (ahead,) = made
    assert len(ahead.jumps) == (NUM_EPOCHS + 2 - 3) * len(list(ahead.net.parameters()))
    assert median(ahead.jumps) > 1 and max(ahead.jumps) <= 4


@pytest.mark.parametrize("lookahead", [-1, 9, 1.5, True, float("nan")])
def test_bad_lookahead_is_refused(lookahead: Any) -> None:
    with pytest.raises(ConfigError, match="'lookahead' of StalenessMethod to be a whole number"):
        StalenessMethod(lookahead=lookahead)

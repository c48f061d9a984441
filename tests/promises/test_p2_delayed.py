"""P2 for delayed gradients: they equal the oracle's, on every path that they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gnnpipe.types import OrderName
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.modules import NETS
from tests.promises.test_p2_stale_gradient import RULES, assert_equals_oracle

PLAIN, DAMPED = 1.0, 0.5
DELAYS = {"plain": PLAIN, "damped": DAMPED}


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize("order", ["fixed", "shuffled"])
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@pytest.mark.parametrize("name", NETS)
def test_one_stage_equals_oracle(
    name: str, num_chunks: int, order: OrderName, delay: float, tmp_path: Path
) -> None:
    assert_equals_oracle(communities(num_chunks), tmp_path, name=name, order=order, delay=delay)


@pytest.mark.parametrize("scale", [0.7, 1.5])
@pytest.mark.parametrize("order", ["fixed", "shuffled"])
@pytest.mark.parametrize("name", NETS)
def test_what_is_in_time_may_be_scaled(
    name: str, order: OrderName, scale: float, tmp_path: Path
) -> None:
    case = communities(5)
    assert_equals_oracle(case, tmp_path, name=name, order=order, delay=DAMPED, scale=scale)


@pytest.mark.parametrize("name", ["gcn", "sage", "edge"])
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_one_stage_equals_oracle_on(case: GraphCase, name: str, tmp_path: Path) -> None:
    assert_equals_oracle(case, tmp_path, name=name, delay=DAMPED)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "num_chunks", "rule", "delay", "recompute"),
    [
        ("gcn", 1, 1, 5, "live", DAMPED, True),
        ("edge", 1, 1, 5, "warmup", PLAIN, True),
        ("edge", 2, 1, 5, "live", DAMPED, True),
        ("gat_jk", 2, 2, 5, "exact", PLAIN, False),
        ("gcnii", 2, 1, 5, "snapshot", DAMPED, False),
        ("gat_jk", 3, 1, 5, "exact", DAMPED, True),
        ("edge", 2, 1, 16, "warmup", PLAIN, False),
        ("gcn", 1, 2, 5, "live", DAMPED, False),
        ("gcn", 1, 2, 5, "warmup", DAMPED, True),
        ("sage", 1, 3, 5, "exact", PLAIN, False),
        ("edge", 1, 2, 5, "live", DAMPED, False),
        ("gat_jk", 1, 3, 2, "live", DAMPED, True),
        ("edge", 2, 2, 5, "snapshot", PLAIN, True),
        ("gcnii", 2, 2, 5, "warmup_exact", DAMPED, False),
        ("gat_jk", 1, 2, 1, "live", DAMPED, False),
    ],
)
def test_stages_shards_and_recomputing_equal_oracle(
    name: str,
    num_stages: int,
    num_shards: int,
    num_chunks: int,
    rule: str,
    delay: float,
    recompute: bool,
    tmp_path: Path,
) -> None:
    assert rule in RULES
    assert_equals_oracle(
        communities(num_chunks),
        tmp_path,
        name=name,
        num_stages=num_stages,
        num_shards=num_shards,
        rule=rule,
        scale=1.5,
        delay=delay,
        recompute=recompute,
        validate=True,
    )

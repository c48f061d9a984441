"""P2 for delayed gradients: they equal the oracle's, on every path that they take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_gnnpipe import DelayedGradients
from lightning_gnnpipe.history import METHODS
from lightning_gnnpipe.types import OrderName
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.modules import NETS
from tests.promises.test_p2_stale_gradient import RULES, assert_equals_oracle

PLAIN, DAMPED, SMOOTH = (1.0, 0.0), (0.5, 0.0), (0.7, 0.6)
AHEAD, SMOOTH_AHEAD = (1.0, 0.0, 0.5), (0.8, 0.4, 1.0)
PREDICTED = METHODS["predicted"].gradients
assert isinstance(PREDICTED, DelayedGradients)
DEFAULT = (PREDICTED.decay, PREDICTED.momentum, PREDICTED.lead)
DELAYS = {
    "plain": PLAIN,
    "damped": DAMPED,
    "smooth": SMOOTH,
    "ahead": AHEAD,
    "smooth, ahead": SMOOTH_AHEAD,
}


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize("order", ["fixed", "shuffled", "mirrored"])
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@pytest.mark.parametrize("name", NETS)
def test_one_stage_equals_oracle(
    name: str, num_chunks: int, order: OrderName, delay: Sequence[float], tmp_path: Path
) -> None:
    assert_equals_oracle(communities(num_chunks), tmp_path, name=name, order=order, delay=delay)


@pytest.mark.parametrize(
    ("delay", "scale"), [(DAMPED, 0.7), (DEFAULT, PREDICTED.scale)], ids=["damped", "default"]
)
@pytest.mark.parametrize("order", ["fixed", "shuffled", "mirrored"])
@pytest.mark.parametrize("name", NETS)
def test_what_is_in_time_may_be_scaled(
    name: str, order: OrderName, delay: Sequence[float], scale: float, tmp_path: Path
) -> None:
    assert_equals_oracle(communities(5), tmp_path, name=name, order=order, delay=delay, scale=scale)


@pytest.mark.parametrize("delay", [SMOOTH, SMOOTH_AHEAD], ids=["smooth", "smooth, ahead"])
@pytest.mark.parametrize("name", ["gcn", "sage", "edge"])
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_one_stage_equals_oracle_on(
    case: GraphCase, name: str, delay: Sequence[float], tmp_path: Path
) -> None:
    assert_equals_oracle(case, tmp_path, name=name, delay=delay)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "num_chunks", "rule", "delay", "recompute"),
    [
        ("gcn", 1, 1, 5, "live", SMOOTH, True),
        ("edge", 1, 1, 5, "live", SMOOTH, True),
        ("gcn", 1, 1, 5, "warmup", SMOOTH_AHEAD, True),
        ("edge", 2, 1, 5, "live", AHEAD, True),
        ("gcnii", 2, 1, 5, "snapshot", SMOOTH_AHEAD, False),
        ("gcn", 1, 2, 5, "live", SMOOTH_AHEAD, False),
        ("gat_jk", 2, 2, 5, "exact", AHEAD, False),
        ("gcnii", 2, 1, 5, "snapshot", DAMPED, False),
        ("gat_jk", 3, 1, 5, "exact", SMOOTH, True),
        ("edge", 2, 1, 16, "warmup", PLAIN, False),
        ("gcn", 1, 2, 5, "live", SMOOTH, False),
        ("gcn", 1, 2, 5, "warmup", DAMPED, True),
        ("sage", 1, 3, 5, "exact", PLAIN, False),
        ("edge", 1, 2, 5, "live", SMOOTH, False),
        ("gat_jk", 1, 3, 2, "live", DAMPED, True),
        ("edge", 2, 2, 5, "snapshot", PLAIN, True),
        ("gcnii", 2, 2, 5, "warmup_exact", SMOOTH, False),
        ("gat_jk", 1, 2, 1, "live", SMOOTH, False),
    ],
)
def test_stages_shards_and_recomputing_equal_oracle(
    name: str,
    num_stages: int,
    num_shards: int,
    num_chunks: int,
    rule: str,
    delay: Sequence[float],
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

"""P1 and P2 on the graph axis: shards compute what one device computes, bit by bit of rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cases import covering, name_of, slow
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.promises.test_p2_stale_gradient import assert_equals_oracle


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "num_chunks", "rule", "scale", "recompute"),
    [
        slow("gcn", 1, 2, 1, "live", 1.0, False),
        slow("gcn", 1, 2, 5, "live", 1.0, False),
        ("gcn", 1, 3, 5, "live", 2.0, False),
        ("sage", 1, 2, 5, "snapshot", 2.0, False),
        ("gat_jk", 1, 2, 5, "exact", 2.0, False),
        ("gat_jk", 1, 3, 2, "live", 1.0, True),
        ("edge", 1, 2, 5, "warmup", 2.0, False),
        slow("edge", 2, 2, 5, "live", 2.0, True),
        slow("gcnii", 2, 2, 5, "live", 2.0, False),
        ("gcnii", 2, 2, 2, "warmup_exact", 1.0, True),
        slow("sage", 2, 2, 1, "live", 1.0, False),
        slow("sage", 1, 2, 1, "live", 1.0, True),
        ("gat_jk", 1, 2, 1, "live", 1.0, True),
    ],
)
def test_p2_shards_equal_oracle(
    name: str,
    num_stages: int,
    num_shards: int,
    num_chunks: int,
    rule: str,
    scale: float,
    recompute: bool,
    tmp_path: Path,
) -> None:
    assert_equals_oracle(
        communities(num_chunks),
        tmp_path,
        name=name,
        num_stages=num_stages,
        num_shards=num_shards,
        rule=rule,
        scale=scale,
        recompute=recompute,
        validate=True,
    )


@pytest.mark.parametrize(("case", "name"), covering(all_cases(), ["gcn", "edge"]), ids=name_of)
def test_p2_two_shards_equal_oracle_on(case: GraphCase, name: str, tmp_path: Path) -> None:
    assert_equals_oracle(case, tmp_path, name=name, num_shards=2, scale=2.0)

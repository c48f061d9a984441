"""Is the oracle right? Where nothing is stale it meets plain PyG."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.cases import name_of
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.modules import NETS, ReferenceModule
from tests.helpers.record import Step, assert_steps_equal
from tests.helpers.training import Refresh, take_step, train_with_oracle

ORDERS = [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (3, 0, 4, 2, 1), (1, 4, 0, 3, 2), (4, 3, 2, 1, 0)]
NUM_EPOCHS = len(ORDERS)


def train_plain(module: ReferenceModule, case: GraphCase) -> list[Step]:
    """Train with PyG alone."""
    optimizer = module.configure_optimizers()
    return [take_step(module, optimizer, module(case.data), case.data) for _ in range(NUM_EPOCHS)]


def train(
    module: ReferenceModule, case: GraphCase, refresh: Refresh | None = None, **options: Any
) -> list[Step]:
    options = {"orders": lambda epoch: ORDERS[epoch], **options}
    shared = {"refresh": refresh or Refresh(), "num_epochs": NUM_EPOCHS}
    return train_with_oracle(module, case.data, case.partition, **shared, **options)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("case", [*all_cases(), communities(5)], ids=name_of)
def test_exact_equals_plain_pyg(name: str, case: GraphCase) -> None:
    steps = train(ReferenceModule(name), case, Refresh(num_exact_epochs=NUM_EPOCHS))
    assert_steps_equal(steps, train_plain(ReferenceModule(name), case), 1e-12)


@pytest.mark.parametrize("name", NETS)
def test_chunks_without_stale_reads_equal_plain_pyg(name: str) -> None:
    one = communities(1)
    plain = train_plain(ReferenceModule(name), one)
    for scale in (1.0, 2.0):
        options = {"orders": lambda epoch: (0,), "cross_chunk_grad_scale": scale}
        assert_steps_equal(train(ReferenceModule(name), one, **options), plain, 1e-12)
    #   0 -> 1 | -> 2 -> 3 | -> 4 -> 5        edges go to the same chunk or a later one only
    case = communities(3)
    source, target = case.data.edge_index
    keep = case.partition[source] <= case.partition[target]
    case.data.edge_index = case.data.edge_index[:, keep]
    case.data.edge_attr = case.data.edge_attr[keep]
    steps = train(ReferenceModule(name), case, orders=lambda epoch: (0, 1, 2))
    assert_steps_equal(steps, train_plain(ReferenceModule(name), case), 1e-12)

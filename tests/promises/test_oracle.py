"""Is the oracle right? It meets plain PyG where nothing is stale, and dense algebra elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import dense
from tests.helpers.cases import name_of
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.modules import NETS, ReferenceModule
from tests.helpers.record import Step, assert_steps_equal
from tests.helpers.training import Refresh, take_step, train_with_oracle

LR = 0.1
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


# Which rows are stale in epochs 0 to 4, by hand: "x" none, the step is exact; a number, those that
# this epoch's forward pass wrote; "new", those of an exact pass with the weights of this epoch.
RULES = {
    "live": (Refresh(), ["x", 0, 1, 2, 3]),
    "warmup": (Refresh(num_exact_epochs=3), ["x", "x", "x", 2, 3]),
    "snapshot": (Refresh(every_n_epochs=2), ["x", 0, 1, 1, 3]),
    "snapshot, warmup": (Refresh(2, every_n_epochs=3), ["x", "x", 1, 2, 2]),
    "exact": (Refresh(every_n_epochs=2, how="exact"), ["x", 0, "new", 2, "new"]),
    "exact, warmup": (Refresh(3, every_n_epochs=2, how="exact"), ["x", "x", "x", 2, "new"]),
}


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_stale_steps_equal_dense_algebra(scale: float, rule: str) -> None:
    refresh, stale = RULES[rule]
    case, module = communities(5), ReferenceModule("gcn", optimizer="sgd", lr=LR)
    expected = train_dense(module, case, stale, scale)
    steps = train(module, case, refresh, cross_chunk_grad_scale=scale)
    assert_steps_equal(steps, expected, 1e-12)


def train_dense(
    module: ReferenceModule, case: GraphCase, stale: list[str | int], scale: float
) -> list[Step]:
    """Train by hand: no PyG, no autograd, no optimizer."""
    data = case.data
    weights = {key: p.detach().clone() for key, p in module.net.named_parameters()}
    num_layers = len(module.net.convs)
    adjacency = dense.gcn_adjacency(data.edge_index, case.partition.numel())
    whole = dense.Split.of(adjacency, torch.zeros_like(case.partition), (0,))
    written: list[list[Tensor]] = []
    steps = []
    for order, rule in zip(ORDERS, stale, strict=True):
        split, history = dense.Split.of(adjacency, case.partition, order), None
        if rule == "x":
            split = whole
        elif rule == "new":
            history = dense.gcn(weights, data.x, whole, None, num_layers)[1]
        else:
            history = written[rule]
        outputs, sources, inputs = dense.gcn(weights, data.x, split, history, num_layers)
        written.append(sources)
        loss, grad = dense.cross_entropy(outputs, data.y, data.train_mask)
        grads = dense.gcn_grads(weights, inputs, split, grad, scale)
        weights = {key: weight - LR * grads[key] for key, weight in weights.items()}
        steps.append(Step(outputs, loss, _in_net(grads), _in_net(weights)))
    return steps


def _in_net(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"net.{name}": value for name, value in named.items()}

"""P2: chunked training equals the single-graph oracle: outputs, gradients, weights, each epoch."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_gnnpipe import EmbeddingRefresh, StalenessMonitor, StalenessWarmup
from lightning_gnnpipe.staleness import METHODS, StalenessMethod
from tests.helpers.cases import covering, name_of, slow
from tests.helpers.graphs import GraphCase, all_cases, case_of, communities
from tests.helpers.launch import SEED, run_fit
from tests.helpers.modules import NETS, ReferenceModule
from tests.helpers.orders import order_of_step
from tests.helpers.record import assert_steps_equal
from tests.helpers.training import Refresh, train_with_oracle

NUM_EPOCHS = 4
Scale = float | Literal["drift"]
SCALES: list[Scale] = [1.0, 2.0, "drift"]

RULES = {
    "live": Refresh(),
    "warmup": Refresh(num_exact_epochs=2),
    "snapshot": Refresh(every_n_epochs=2),
    "exact": Refresh(every_n_epochs=2, how="exact"),
    "warmup_snapshot": Refresh(num_exact_epochs=2, every_n_epochs=4),
    "warmup_exact": Refresh(num_exact_epochs=2, every_n_epochs=3, how="exact"),
}
OPTIMIZER = {"optimizer": "momentum", "lr": 0.1, "weight_decay": 0.01}
LINEAR = {"gcn", "sage", "gcnii"}  # nets whose messages are a weighted sum


def callbacks_of(refresh: Refresh) -> list[Any]:
    """Return the callbacks that switch on what `method` does not."""
    chosen: list[Any] = []
    if refresh.every_n_epochs:
        chosen.append(EmbeddingRefresh(refresh.every_n_epochs, refresh.how))
    if refresh.num_exact_epochs > 1:
        chosen.append(StalenessWarmup(num_epochs=refresh.num_exact_epochs))
    return chosen


def method(scale: Scale) -> Any:
    """Return the method with one factor of gradients, or the default without validation's rows."""
    if scale == "drift":
        return METHODS["drift"]
    return StalenessMethod(linear_scale=scale, message_scale=scale)


def scale_of(scale: Scale, name: str, case: GraphCase) -> float:
    """Return the factor that the oracle takes."""
    if scale != "drift":
        return scale
    source, target = case.partition[case.data.edge_index]
    is_dense = 10 * int((source != target).sum()) > 7 * source.numel()
    return 1.0 if name in LINEAR and not is_dense else 2.0


def assert_equals_oracle(
    case: GraphCase,
    tmp_path: Path,
    *,
    name: str = "gcn",
    num_stages: int = 1,
    num_shards: int = 1,
    rule: str | Refresh = "live",
    scale: Scale = 1.0,
    optimizer: str = "momentum",
    validate: bool = False,
    watches: bool = False,
    **strategy: Any,
) -> None:
    refresh = RULES[rule] if isinstance(rule, str) else rule
    options: dict[str, Any] = {**OPTIMIZER, "optimizer": optimizer}
    if optimizer == "adam":
        options["lr"] = 0.01
    oracle = ReferenceModule(name, **options)
    expected = train_with_oracle(
        oracle,
        case.data,
        case.partition,
        orders=lambda epoch: order_of_step(case.num_chunks, epoch, SEED),
        refresh=refresh,
        num_epochs=NUM_EPOCHS,
        cross_chunk_grad_scale=scale_of(scale, name, case),
        follows_drift=scale == "drift",
    )
    fit = run_fit(
        ReferenceModule(name, **options),
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=case.num_chunks,
        partition=case.partition,
        callbacks=[*([StalenessMonitor()] if watches else []), *callbacks_of(refresh)],
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
        trainer_kwargs={"limit_val_batches": 1.0 if validate else 0},
        strategy_kwargs=strategy,
        method=method(scale),
    )
    assert_steps_equal(fit.steps, expected)
    state = dict(oracle.state_dict())
    torch.testing.assert_close(fit.state_dict, state, rtol=1e-10, atol=1e-10)


AGAIN: dict[str, Any] = {"recompute": True, "validate": True}
SHARDS: dict[str, Any] = {"num_shards": 2, "validate": True}
REPEATED: dict[str, Any] = {"scale": 2.0, "validate": True, "repeat_encoder": True}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("num_chunks", "rule", "scale", "name"), covering([1, 2, 5, 16], RULES, SCALES, NETS, times=3)
)
def test_one_stage_equals_oracle(
    num_chunks: int, rule: str, scale: Scale, name: str, tmp_path: Path
) -> None:
    assert_equals_oracle(communities(num_chunks), tmp_path, name=name, rule=rule, scale=scale)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("case", "name", "options"),
    covering(
        all_cases(), ["gcn", "sage", "edge"], [{"scale": "drift"}, {"num_shards": 2, "scale": 2.0}]
    ),
    ids=name_of,
)
def test_small_graphs_equal_oracle(
    case: GraphCase, name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_equals_oracle(case, tmp_path, name=name, **options)


@st.composite
def graphs(draw: st.DrawFn) -> GraphCase:
    """Up to 14 nodes in up to 5 chunks, any directed edges, loops and repetitions included."""
    num_chunks = draw(st.integers(1, 5))
    rest = draw(st.lists(st.integers(0, num_chunks - 1), max_size=9))
    partition = draw(st.permutations([*range(num_chunks), *rest]))
    node = st.integers(0, len(partition) - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=40))
    return case_of("any", edges, partition)


@settings(
    max_examples=int(os.environ.get("GNNPIPE_FUZZ", "5")),
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    case=graphs(),
    options=st.fixed_dictionaries(
        {
            "name": st.sampled_from(sorted(NETS)),
            "optimizer": st.sampled_from(["sgd", "momentum"]),
            "num_stages": st.sampled_from([1, 1, 1, 2, 3]),
            "scale": st.sampled_from([0.0, 1.0, 2.0, "drift"]),
            "rule": st.builds(
                Refresh,
                num_exact_epochs=st.sampled_from([1, 1, 2, NUM_EPOCHS]),
                every_n_epochs=st.sampled_from([0, 0, 1, 2, 3]),
                how=st.sampled_from(["snapshot", "exact"]),
            ),
            "recompute": st.booleans(),
            "validate": st.booleans(),
            "watches": st.booleans(),
            "balance": st.sampled_from(["measured", "uniform"]),
        }
    ),
)
def test_any_run_equals_the_oracle(case: GraphCase, options: dict[str, Any]) -> None:
    """`GNNPIPE_FUZZ=500 pytest -k any_run` draws more of them."""
    with tempfile.TemporaryDirectory() as folder:
        assert_equals_oracle(case, Path(folder), **options)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("name", "num_stages", "num_chunks", "options"),
    [
        # every value of every option on two stages and on three; in the fast ones, on either
        ("gcnii", 2, 5, {"rule": "warmup_snapshot", "scale": "drift"}),
        ("gat_jk", 3, 16, {"scale": "drift"}),
        ("sage", 2, 16, {"rule": "snapshot", "scale": 2.0, "optimizer": "sgd"}),
        slow("gcnii", 2, 2, {"rule": "exact", "scale": 2.0, "optimizer": "adam"}),
        slow("edge", 2, 16, {"rule": "warmup", "scale": 2.0, "optimizer": "sgd"}),
        ("gcn", 2, 1, {"rule": "warmup_exact", "optimizer": "adam"}),
        slow("gcn", 3, 16, {"rule": "snapshot", "optimizer": "adam"}),
        ("sage", 3, 2, {"rule": "warmup"}),
        ("gat_jk", 3, 16, {"rule": "exact", "scale": 2.0, "optimizer": "sgd"}),
        slow("gcnii", 3, 1, {"rule": "warmup_snapshot", "optimizer": "sgd"}),
        # activations that are computed again, and validation between the steps
        ("gcnii", 2, 5, {"rule": "warmup_snapshot", "scale": "drift", **AGAIN}),
        ("edge", 1, 5, {"rule": "exact", "scale": "drift", **AGAIN}),
        ("gcn", 1, 5, {"validate": True}),
        ("gcn", 2, 5, {"validate": True, "weights": "staged"}),
        # shards
        ("gcn", 1, 5, {"scale": 2.0, **SHARDS, "num_shards": 3}),
        ("sage", 1, 5, {"rule": "snapshot", "scale": 2.0, **SHARDS}),
        ("gat_jk", 1, 5, {"rule": "exact", "scale": 2.0, **SHARDS}),
        ("gat_jk", 1, 2, {**AGAIN, "num_shards": 3}),
        ("edge", 1, 5, {"rule": "warmup", "scale": 2.0, **SHARDS}),
        slow("edge", 2, 5, {"scale": 2.0, **AGAIN, **SHARDS}),
        ("gcnii", 2, 2, {"rule": "warmup_exact", **AGAIN, **SHARDS}),
        ("gat_jk", 1, 1, {**AGAIN, **SHARDS}),
        # encoders that each stage computes
        ("encoded", 2, 5, REPEATED),
        ("in_place", 3, 5, {"rule": "snapshot", **AGAIN, **REPEATED}),
        slow("overwritten", 2, 5, REPEATED),
        ("behind", 2, 5, {"rule": "warmup", **AGAIN, **REPEATED}),
        slow("frozen", 3, 5, REPEATED),
        ("two", 3, 5, {"rule": "exact", **AGAIN, **REPEATED}),
        slow("pyg", 2, 5, REPEATED),
        slow("edge_encoded", 3, 5, REPEATED),
        ("encoded", 2, 5, {**AGAIN, **SHARDS, **REPEATED}),
        ("edge_encoded", 2, 5, {"rule": "warmup_exact", **SHARDS, **REPEATED}),
    ],
)
def test_stages_and_shards_equal_oracle(
    name: str, num_stages: int, num_chunks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    case = communities(num_chunks)
    assert_equals_oracle(case, tmp_path, name=name, num_stages=num_stages, **options)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", NETS)
def test_every_option_changes_the_result(name: str) -> None:
    """Otherwise, an option that does nothing would pass the tests above."""
    case = communities(5)
    losses = {}
    for rule, scale, order in product(RULES, SCALES, [(0, 1, 2, 3, 4), (3, 1, 0, 4, 2)]):
        steps = train_with_oracle(
            ReferenceModule(name, **OPTIMIZER),
            case.data,
            case.partition,
            orders=lambda epoch, order=order: order,
            refresh=RULES[rule],
            num_epochs=NUM_EPOCHS,
            cross_chunk_grad_scale=scale_of(scale, name, case),
            follows_drift=scale == "drift",
        )
        losses[rule, scale, order] = float(steps[-1].loss)
    exact = Refresh(num_exact_epochs=NUM_EPOCHS)
    oracle = ReferenceModule(name, **OPTIMIZER)
    steps = train_with_oracle(
        oracle, case.data, case.partition, orders=lambda epoch: (), refresh=exact, num_epochs=4
    )
    losses["exact"] = float(steps[-1].loss)
    gaps = [after - before for before, after in pairwise(sorted(losses.values()))]
    assert min(gaps) > 1e-8, losses

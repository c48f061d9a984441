"""P2: chunked training equals the single-graph oracle: outputs, gradients, weights, each epoch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lightning_gnnpipe.types import OrderName, RepeatOption
from tests.helpers.cases import covering, name_of, slow, some
from tests.helpers.graphs import GraphCase, all_cases, communities
from tests.helpers.launch import SEED, run_fit
from tests.helpers.modules import NETS, ReferenceModule
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


def callbacks(rule: str) -> list[Any]:
    """Return the callbacks that switch a rule on."""
    return callbacks_of(RULES[rule])


def callbacks_of(refresh: Refresh) -> list[Any]:
    """Return the callbacks that switch on what `method` does not."""
    from lightning_gnnpipe import EmbeddingRefresh, StalenessWarmup

    chosen: list[Any] = []
    if refresh.num_exact_epochs > 1:
        chosen.append(StalenessWarmup(num_epochs=refresh.num_exact_epochs))
    if refresh.every_n_epochs:
        chosen.append(EmbeddingRefresh(refresh.every_n_epochs, refresh.how))
    return chosen[::-1]


LINEAR = {"gcn", "sage", "gcnii"}  # nets whose messages are a weighted sum


def method(scale: Scale) -> Any:
    """Return the method with one factor of gradients, or the default without validation's rows."""
    from lightning_gnnpipe.staleness import METHODS, StalenessMethod

    if scale == "drift":
        return replace(METHODS["drift"], takes_validation=False)
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
    order: OrderName = "shuffled",
    rule: str = "live",
    scale: Scale = 1.0,
    optimizer: str = "momentum",
    validate: bool = False,
    recompute: bool = False,
    repeat_encoder: RepeatOption = "auto",
) -> None:
    from lightning_gnnpipe.graph import chunk_order

    options: dict[str, Any] = {**OPTIMIZER, "optimizer": optimizer}
    if optimizer == "adam":
        options["lr"] = 0.01
    oracle = ReferenceModule(name, **options)
    expected = train_with_oracle(
        oracle,
        case.data,
        case.partition,
        orders=lambda epoch: chunk_order(case.num_chunks, epoch=epoch, seed=SEED, order=order),
        refresh=RULES[rule],
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
        callbacks=callbacks(rule),
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
        trainer_kwargs={"limit_val_batches": 1.0 if validate else 0},
        strategy_kwargs={
            "chunk_order": order,
            "recompute": recompute,
            "repeat_encoder": repeat_encoder,
        },
        method=method(scale),
    )
    assert_steps_equal(fit.steps, expected)
    for key, value in oracle.state_dict().items():
        torch.testing.assert_close(fit.state_dict[key], value, rtol=1e-10, atol=1e-10)


# The product of all options on one stage; the models take turns. One in eleven has every value.
OPTIONS = list(product([1, 2, 5, 16], ["fixed", "shuffled"], RULES, SCALES))


@pytest.mark.parametrize(
    ("num_chunks", "order", "rule", "scale", "name"),
    some(
        [(*options, list(NETS)[turn % len(NETS)]) for turn, options in enumerate(OPTIONS)],
        every=11,
    ),
)
def test_one_stage_equals_oracle(
    num_chunks: int, order: OrderName, rule: str, scale: Scale, name: str, tmp_path: Path
) -> None:
    assert_equals_oracle(
        communities(num_chunks), tmp_path, name=name, order=order, rule=rule, scale=scale
    )


@pytest.mark.parametrize(
    ("case", "name"), covering(all_cases(), ["gcn", "sage", "edge"]), ids=name_of
)
def test_one_stage_equals_oracle_on(case: GraphCase, name: str, tmp_path: Path) -> None:
    assert_equals_oracle(case, tmp_path, name=name, scale="drift")


@pytest.mark.parametrize(
    ("name", "num_stages", "num_chunks", "order", "rule", "scale", "optimizer"),
    [
        # every value of every option on two stages and on three; in the fast ones, on either
        slow("gcn", 2, 5, "shuffled", "live", 1.0, "momentum"),
        ("gcnii", 2, 5, "shuffled", "warmup_snapshot", "drift", "momentum"),
        ("gat_jk", 3, 16, "shuffled", "live", "drift", "momentum"),
        ("sage", 2, 16, "fixed", "snapshot", 2.0, "sgd"),
        slow("gcnii", 2, 2, "shuffled", "exact", 2.0, "adam"),
        slow("gat_jk", 2, 5, "shuffled", "warmup_snapshot", 1.0, "momentum"),
        slow("edge", 2, 16, "shuffled", "warmup", 2.0, "sgd"),
        ("gcn", 2, 1, "fixed", "warmup_exact", 1.0, "adam"),
        slow("gcnii", 3, 5, "shuffled", "live", 2.0, "momentum"),
        slow("gcn", 3, 16, "shuffled", "snapshot", 1.0, "adam"),
        ("sage", 3, 2, "fixed", "warmup", 1.0, "momentum"),
        ("gat_jk", 3, 16, "shuffled", "exact", 2.0, "sgd"),
        slow("edge", 3, 5, "fixed", "warmup_exact", 2.0, "momentum"),
        slow("gcnii", 3, 1, "shuffled", "warmup_snapshot", 1.0, "sgd"),
    ],
)
def test_stages_equal_oracle(
    name: str,
    num_stages: int,
    num_chunks: int,
    order: OrderName,
    rule: str,
    scale: Scale,
    optimizer: str,
    tmp_path: Path,
) -> None:
    assert_equals_oracle(
        communities(num_chunks),
        tmp_path,
        name=name,
        num_stages=num_stages,
        order=order,
        rule=rule,
        scale=scale,
        optimizer=optimizer,
    )


@pytest.mark.parametrize(
    "case",
    some([case for case in all_cases() if case.num_chunks == 3][:4], every=2),
    ids=name_of,
)
def test_two_stages_equal_oracle_on(case: GraphCase, tmp_path: Path) -> None:
    assert_equals_oracle(case, tmp_path, name="edge", num_stages=2)


@pytest.mark.parametrize(
    ("name", "num_stages", "rule"),
    [("gcnii", 2, "warmup_snapshot"), slow("gat_jk", 3, "live"), ("edge", 1, "exact")],
)
def test_recomputed_activations_equal_oracle(
    name: str, num_stages: int, rule: str, tmp_path: Path
) -> None:
    assert_equals_oracle(
        communities(5),
        tmp_path,
        name=name,
        num_stages=num_stages,
        rule=rule,
        scale="drift",
        validate=True,
        recompute=True,
    )


@pytest.mark.parametrize("num_stages", [1, 2])
def test_validation_leaves_stale_rows_as_they_were(num_stages: int, tmp_path: Path) -> None:
    assert_equals_oracle(communities(5), tmp_path, num_stages=num_stages, validate=True)


@pytest.mark.parametrize("name", some(NETS, every=4))
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
    ranked = sorted(losses.values())
    gaps = [after - before for before, after in pairwise(ranked)]
    assert min(gaps) > 1e-8, losses

"""`AdaptiveGradients`: what is measured, and which rule it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe import AdaptiveGradients, DelayedGradients
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import ChunkPlan, plan_from_assignment
from lightning_gnnpipe.history import (
    Adapted,
    GradientRule,
    HistoryOptions,
    HistoryStore,
    SavedHistory,
    StalenessMethod,
    adaptive,
)
from lightning_gnnpipe.history.adaptive import EVERY_N_STEPS

# Chunk 0 = nodes 0, 1; chunk 1 = nodes 2, 3, 4. Each reads two rows of the other.
EDGES = torch.tensor([[0, 1, 4, 3], [2, 3, 1, 1]])
RULES = AdaptiveGradients(threshold=0.5)
STEADY, NOISY = RULES.steady.scale, RULES.noisy.scale


@pytest.fixture
def plan() -> ChunkPlan:
    return plan_from_assignment(EDGES, 5, torch.tensor([0, 0, 1, 1, 1]))


def make_store(
    plan: ChunkPlan, rule: GradientRule = RULES, keys: Sequence[str] = ("h",)
) -> HistoryStore:
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(rule)))
    for key in keys:
        store.push(key, plan.whole.chunks[0], torch.zeros(5, 2, dtype=torch.float64))
    return store


def alone(sums: Tensor) -> None:
    """Sum over one rank."""


def train(
    store: HistoryStore,
    plan: ChunkPlan,
    cosines: Sequence[float] = (1.0, 1.0),
    *,
    size: float = 1.0,
    dtype: torch.dtype = torch.float64,
    sum_over_ranks: Callable[[Tensor], None] = alone,
) -> None:
    """Make a step in which each chunk's gradients have these cosines with the direction (1, 0)."""
    for key in store:
        for chunk in reversed(plan.chunks):
            cosine = cosines[chunk.index]
            row = torch.tensor([cosine, (1 - cosine**2) ** 0.5], dtype=torch.float64)
            rows = size * (1 + chunk.index) * row.expand(chunk.num_nodes, 2)
            store.add_output_grad(key, chunk, rows.to(dtype))
    store.end_step(is_exact=False)
    store.adapt(sum_over_ranks)


def ask(store: HistoryStore, plan: ChunkPlan, *cosines: float, **options: object) -> None:
    """Train until gradients have just been measured."""
    for _ in range(EVERY_N_STEPS - 1):
        train(store, plan)
    train(store, plan, cosines, **options)


def correlation(store: HistoryStore) -> float | None:
    found = store.save("h").gradients
    assert found is not None and found.adapted is not None
    return found.adapted.correlation


def test_the_rule_follows_the_mean_of_the_chunks_correlations(plan: ChunkPlan) -> None:
    """After each measurement the factor is that of R += 0.3 (r - R), with a band under 0.5."""
    store, expected, scale = make_store(plan), None, STEADY
    seen = []
    for size, pair in enumerate([(0.9, 0.3), (0.1, 0.3), (-0.2, 0.2), (0.9, 0.7), (1.0, 0.9)]):
        for _ in range(EVERY_N_STEPS - 1):
            train(store, plan)
            assert (store.scale_of("h"), correlation(store)) == (scale, expected)
        train(store, plan, pair, size=1.0 + size)
        newest = sum(pair) / 2
        expected = newest if expected is None else 0.7 * expected + 0.3 * newest
        if expected >= 0.5:
            scale = STEADY
        elif expected < 0.85 * 0.5:
            scale = NOISY
        assert store.scale_of("h") == scale
        expected = correlation(store) if correlation(store) == pytest.approx(expected) else None
        assert expected is not None
        seen.append((scale, 0.425 <= expected < 0.5))
    assert seen == [(1.5, False), (1.5, True), (1.25, False), (1.25, True), (1.5, False)]


def test_each_history_is_measured_by_itself_over_all_ranks(plan: ChunkPlan) -> None:
    """Another rank has as much of each chunk, but opposite gradients in the second history."""
    store = make_store(plan, keys=("h", "other"))

    def sum_over_ranks(sums: Tensor) -> None:
        assert sums.shape == (2, 2, 3)
        theirs = sums.clone()
        theirs[1, :, 0] *= -1
        sums += theirs

    ask(store, plan, 1.0, 1.0, sum_over_ranks=sum_over_ranks)
    assert (store.scale_of("h"), store.scale_of("other")) == (STEADY, NOISY)


def test_exact_steps_between_put_a_measurement_off(plan: ChunkPlan) -> None:
    """One in every five: without steps before them, gradients are compared with none."""
    store = make_store(plan)
    for step in range(1, 9):
        if step % EVERY_N_STEPS == 0:
            store.end_step(is_exact=True)
        else:
            train(store, plan, (0.0, 0.0) if step % 2 else (1.0, 1.0))
        assert (correlation(store) is None) == (step < 7)  # 1 to 4, none in 6, first in 7
    assert store.scale_of("h") == NOISY


def test_gradients_of_halos_are_not_measured(plan: ChunkPlan) -> None:
    """Parts of those of one row may lie on several ranks."""
    store = make_store(plan)
    for step in range(3 * EVERY_N_STEPS):
        for chunk in reversed(plan.chunks):
            rows = torch.full((chunk.num_halo, 2), (-1.0) ** step, dtype=torch.float64)
            store.push_grad("h", chunk, rows)
        store.end_step(is_exact=False)
        store.adapt(alone)
    assert store.scale_of("h") == STEADY and correlation(store) is None


@pytest.mark.parametrize("bad", [1e200, float("inf"), float("nan"), 0.0])
def test_gradients_that_are_none_say_nothing(plan: ChunkPlan, bad: float) -> None:
    store = make_store(plan)
    ask(store, plan, 0.0, 0.0, size=bad)
    assert store.scale_of("h") == STEADY and correlation(store) is None
    store.rescale(0.5)  # lower: they have overflowed
    ask(store, plan, 0.1, 0.1)
    assert store.scale_of("h") == NOISY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_halves_are_multiplied_as_floats(
    plan: ChunkPlan, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in slices; products of such small numbers are none in half precision."""
    monkeypatch.setattr(adaptive, "_SLICE", 3)
    store = HistoryStore(5, 2, HistoryOptions(StalenessMethod(RULES)))
    store.push("h", plan.whole.chunks[0], torch.zeros(5, 2, dtype=dtype))
    for cosine in (1.0, 1.0, 1.0, 1.0, 0.6):
        train(store, plan, (cosine, cosine), size=2.0**-14, dtype=dtype)
    assert correlation(store) == pytest.approx(0.6, abs=0.01)


def test_measuring_follows_the_loss_scale(plan: ChunkPlan) -> None:
    """The last gradients grow with it, as do those that are late."""
    store = make_store(plan)
    for _ in range(EVERY_N_STEPS - 1):
        train(store, plan)
    before = store.save("h").gradients
    assert before is not None and before.last_outputs is not None
    last = before.last_outputs.clone()
    store.rescale(4.0)
    after = store.save("h").gradients
    assert after is not None and after.last_outputs is not None
    assert torch.equal(after.last_outputs, 4 * last)
    train(store, plan, (0.3, 0.3), size=4.0)
    assert correlation(store) == pytest.approx(0.3)


def test_what_a_failed_step_has_measured_is_forgotten(plan: ChunkPlan) -> None:
    store = make_store(plan)
    for _ in range(EVERY_N_STEPS - 1):
        train(store, plan)
    store.add_output_grad("h", plan.chunks[1], -torch.ones(3, 2, dtype=torch.float64))
    store.end_step(is_exact=True)
    train(store, plan)
    assert correlation(store) is None


def late_of(store: HistoryStore, plan: ChunkPlan) -> tuple[float, float]:
    """Return what the first row is given late: through halos, and through outputs."""
    given = store.pull_grad("h", plan.chunks[0])
    table, _ = store.add_output_grad("h", plan.chunks[0], torch.ones(2, 2, dtype=torch.float64))
    scale = store.scale_of("h")
    return 0.0 if given is None else float(given[0, 0]), scale * float(table[2, 0])


def test_what_waits_is_given_as_the_former_rule_has_made_it(plan: ChunkPlan) -> None:
    """Cosines of 1, then of 0: chunk 1, of size 2, had 2 before and has 0 now."""
    store = make_store(plan)
    ask(store, plan, 0.0, 0.0)
    assert store.scale_of("h") == NOISY
    steady, noisy = RULES.steady, RULES.noisy
    assert late_of(store, plan)[1] == pytest.approx(steady.decay * (0 + steady.lead * (0 - 2)))
    for _ in range(2):
        ask(store, plan, 1.0, 1.0)  # R is 0.51 then
    assert store.scale_of("h") == STEADY
    assert late_of(store, plan)[1] == pytest.approx(noisy.decay * 2)


NAMED: dict[str, GradientRule] = {
    "adaptive": RULES,
    "plain": DelayedGradients(),
    "damped": DelayedGradients(0.5, scale=1.25),
    "ahead": DelayedGradients(0.75, scale=1.5, lead=0.3),
    "smooth": DelayedGradients(0.75, scale=1.5, momentum=0.3),
    "none": DelayedGradients(0.0, scale=2.0),
    "none ahead": DelayedGradients(0.0, scale=2.0, lead=0.5),
}


def step_with_halos(store: HistoryStore, plan: ChunkPlan, size: float) -> None:
    for chunk in reversed(plan.chunks):
        store.push_grad("h", chunk, torch.full((chunk.num_halo, 2), size, dtype=torch.float64))
    train(store, plan, (0.1, 0.1), size=size)


@pytest.mark.parametrize("second", NAMED)
@pytest.mark.parametrize("first", NAMED)
def test_another_rule_goes_on_with_what_waits(plan: ChunkPlan, first: str, second: str) -> None:
    store, other = make_store(plan, NAMED[first]), make_store(plan, NAMED[second])
    if first == "adaptive":
        ask(store, plan, 0.0, 0.0)
        assert store.scale_of("h") == NOISY
    for size in (1.0, 2.0):
        step_with_halos(store, plan, size)
    saved = store.save("h")
    other.load("h", saved)
    given = late_of(store, plan)
    assert late_of(other, plan) == pytest.approx((0, 0) if second.startswith("none") else given)


def test_a_history_goes_on_where_it_was(plan: ChunkPlan) -> None:
    first, second = make_store(plan), make_store(plan)
    ask(first, plan, 0.3, 0.3)
    train(first, plan)
    second.load("h", first.save("h"))
    assert second.scale_of("h") == NOISY
    for store in (first, second):
        for cosine in (1.0, 1.0, 1.0, 0.8):
            train(store, plan, (cosine, cosine))
        assert store.scale_of("h") == NOISY
        assert correlation(store) == pytest.approx(0.3 + 0.3 * (0.8 - 0.3))
    first.end_step(is_exact=True)
    left: SavedHistory = first.save("h")
    assert left.gradients is not None and left.gradients.outputs is None
    assert left.gradients.adapted == Adapted(pytest.approx(0.45), True, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"noisy": DelayedGradients()}, "'noisy' of AdaptiveGradients.*'lead' above 0"),
        ({"steady": DelayedGradients(momentum=0.5, lead=0.5)}, "'steady' of AdaptiveGradients"),
        ({"steady": 0.5}, "'steady' of AdaptiveGradients"),
        ({"threshold": float("nan")}, "'threshold' of AdaptiveGradients"),
    ],
)
def test_rules_that_cannot_be_compared_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        AdaptiveGradients(**options)

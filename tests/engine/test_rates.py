"""How far learning rates have fallen."""

from __future__ import annotations

from lightning_gnnpipe.engine.rates import LearningRates


def of_groups(*rates: float) -> dict[tuple[int, int], float]:
    """Return the rates of the groups of one optimizer."""
    return {(0, index): rate for index, rate in enumerate(rates)}


def test_the_rate_that_has_fallen_least_counts() -> None:
    rates = LearningRates()
    assert rates.share(of_groups(0.1, 0.01)) == 1.0
    assert rates.share(of_groups(0.05, 0.001)) == 0.5
    assert rates.share(of_groups(0.0, 0.001)) == 0.1
    assert rates.peaks == of_groups(0.1, 0.01)


def test_while_a_rate_rises_it_is_the_largest() -> None:
    rates = LearningRates()
    found = [rates.share(of_groups(rate)) for rate in (0.25, 0.5, 1.0, 0.5)]
    assert found == [1.0, 1.0, 1.0, 0.5]


def test_peaks_are_gone_on_with() -> None:
    rates = LearningRates()
    rates.peaks = of_groups(2.0)
    assert rates.share(of_groups(0.5)) == 0.25


def test_optimizers_without_a_rate_or_with_none_at_all() -> None:
    assert LearningRates().share({}) == 1.0
    assert LearningRates().share(of_groups(0.0)) == 1.0


def test_below_nothing_is_nothing() -> None:
    rates = LearningRates()
    rates.share(of_groups(1.0))
    assert rates.share(of_groups(-0.25)) == 0.0


def test_a_group_that_is_added_leaves_the_peaks_of_the_others() -> None:
    rates = LearningRates()
    rates.share({(0, 0): 1.0, (1, 0): 4.0})
    assert rates.share({(0, 0): 0.5, (0, 1): 0.25, (1, 0): 1.0}) == 1.0
    assert rates.share({(0, 0): 0.5, (0, 1): 0.125, (1, 0): 0.5}) == 0.5
    assert rates.peaks == {(0, 0): 1.0, (0, 1): 0.25, (1, 0): 4.0}


def test_a_group_that_is_frozen_for_a_while_has_its_peak_again() -> None:
    rates = LearningRates()
    rates.share(of_groups(1.0, 1.0))
    assert rates.share({(0, 0): 0.5}) == 0.5
    assert rates.share(of_groups(0.25, 0.125)) == 0.25

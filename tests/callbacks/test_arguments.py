"""Callbacks check what they are given, and what they are used with."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import pytest

from lightning_gnnpipe import (
    EmbeddingRefresh,
    GNNPipeStrategy,
    PipelineMonitor,
    StalenessMonitor,
    StalenessWarmup,
    TimelineCallback,
)
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.steps import Controls
from tests.helpers.observed import fit, make_data, make_module


@pytest.mark.parametrize(
    ("make", "values", "text"),
    [
        (StalenessWarmup, [-1, 1.5, True, "3"], "'num_epochs' to be an integer of at least 0"),
        (PipelineMonitor, [0, 2.0, True], "'every_n_epochs' to be an integer of at least 1"),
        (StalenessMonitor, [0, 2.0, True], "'every_n_epochs' to be an integer of at least 1"),
        (EmbeddingRefresh, [0, 2.5, True], "'every_n_epochs' to be an integer of at least 1"),
        (
            lambda value: EmbeddingRefresh(2, how=value),
            ["copy"],
            "'how' of EmbeddingRefresh to be 'exact' or 'snapshot'",
        ),
        (TimelineCallback, [-1, 2.0, "last"], "'epoch' to be an integer of at least 0"),
    ],
)
def test_arguments_are_checked(
    make: Callable[[object], object], values: list[object], text: str
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=text):
            make(value)


CALLBACKS = PipelineMonitor(), StalenessMonitor(), StalenessWarmup(1), TimelineCallback()


@pytest.mark.parametrize("callback", CALLBACKS)
def test_callbacks_need_the_strategy(callback: L.Callback) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[callback], logger=False)
    name = type(callback).__name__
    with pytest.raises(ConfigError, match=f"{name} to be used with GNNPipeStrategy"):
        trainer.fit(make_module(), make_data())


def test_callbacks_leave_the_switches_off() -> None:
    trainer = fit(1, StalenessWarmup(9), StalenessMonitor())
    assert isinstance(trainer.strategy, GNNPipeStrategy)
    assert trainer.strategy.controls == Controls()

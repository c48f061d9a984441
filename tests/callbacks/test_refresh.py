"""Embedding refresh, and how what callbacks ask for adds up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import permutations
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_gnnpipe import (
    BoundedStaleness,
    EmbeddingRefresh,
    StalenessMonitor,
    StalenessWarmup,
)
from lightning_gnnpipe.engine import PipelineEngine
from tests.helpers.observed import fit, make_data, make_module, make_trainer

NUM_EPOCHS = 7
MAKE: dict[str, Callable[[], L.Callback]] = {
    "warmup": lambda: StalenessWarmup(3),
    "exact": lambda: EmbeddingRefresh(2),
    "snapshot": lambda: EmbeddingRefresh(3, how="snapshot"),
    "monitor": lambda: StalenessMonitor(2),
    "bounded": lambda: BoundedStaleness(2),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect what is asked for in each training step."""
    found: list[dict[str, Any]] = []
    train = PipelineEngine._train

    def watched(self: PipelineEngine, *args: Any, **kwargs: Any) -> Any:
        found.append(asdict(self.controls))
        return train(self, *args, **kwargs)

    monkeypatch.setattr(PipelineEngine, "_train", watched)
    monkeypatch.setattr(BoundedStaleness, "setup", lambda *args, stage: None)  # there are no shards
    return found


def run(asked: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    asked.clear()
    fit(1, *(MAKE[name]() for name in names), max_epochs=NUM_EPOCHS)
    assert len(asked) == NUM_EPOCHS
    return list(asked)


def test_warmup_and_refresh_ask_for_exact_steps(asked: list[dict[str, Any]]) -> None:
    assert [step["is_exact"] for step in run(asked, "warmup")] == [True] * 3 + [False] * 4
    due = [epoch > 0 and epoch % 2 == 0 for epoch in range(NUM_EPOCHS)]
    assert [step["refreshes"] for step in run(asked, "exact")] == due


def test_each_of_several_inputs_is_copied(asked: list[dict[str, Any]]) -> None:
    trainer = make_trainer(1, 4, EmbeddingRefresh(2, how="snapshot"), max_epochs=4)
    graphs = [make_data().data for _ in range(3)]
    trainer.fit(make_module(), DataLoader(graphs, batch_size=None))
    copied = [step["takes_snapshot"] for step in asked]
    assert copied == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3


@pytest.mark.some_cases(6)
@pytest.mark.parametrize("pair", permutations(MAKE, 2), ids="-".join)
def test_all_pairs_ask_for_what_each_asks_for(
    pair: tuple[str, str], asked: list[dict[str, Any]]
) -> None:
    """In either order, and in each step anew."""
    both = [
        {name: one[name] or other[name] for name in one}
        for one, other in zip(*(run(asked, name) for name in pair), strict=True)
    ]
    assert run(asked, *pair) == both

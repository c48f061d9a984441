"""What is told about the model at the start: Lightning's summary, and the table of stages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_summary import summarize

from lightning_gnnpipe.models import GCNII, NodeClassifier
from tests.helpers.observed import NUM_CLASSES, NUM_FEATURES, fit, make_module


class Keep(ModelSummary):
    """Writes what the summary is on each rank and in each fit."""

    def __init__(self, folder: Path) -> None:
        super().__init__(max_depth=-1)
        self.folder = folder

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        number = len(list(self.folder.glob(f"{trainer.global_rank}_*")))
        found = table(pl_module)
        (self.folder / f"{trainer.global_rank}_{number}.json").write_text(json.dumps(found))


def table(module: L.LightningModule) -> dict[str, Any]:
    summary = summarize(module, max_depth=-1)
    sizes = {
        name: (one.num_parameters, str(one.in_size), str(one.out_size))
        for name, one in summary._layer_summary.items()
    }
    return {"total": summary.total_parameters, "sizes": json.loads(json.dumps(sizes))}


class Drawn(NodeClassifier):
    """Takes a graph, or its tensors, as a summary with sizes and a drawing need it."""

    def __init__(self) -> None:
        net = make_module().net
        super().__init__(net, NUM_CLASSES)
        edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        self.example_input_array = (torch.zeros(4, NUM_FEATURES), edges)

    def forward(self, data: Any, edge_index: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(data) if edge_index is None else self.net(data, edge_index)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("make", [Drawn, make_module])
def test_model_summary_is_right_on_all_ranks_in_every_fit(
    num_stages: int, make: Callable[[], L.LightningModule], tmp_path: Path
) -> None:
    module = make()
    expected = table(module)
    for _ in range(2):
        fit(num_stages, Keep(tmp_path), module=module, max_epochs=1)
    assert table(module) == expected
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [f"{r}_{number}.json" for r in range(num_stages) for number in range(2)]
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text()) == expected


def test_a_logger_may_draw_the_model(tmp_path: Path) -> None:
    """TensorBoard runs the model on the first rank alone, before training."""
    logger = TensorBoardLogger(tmp_path, name="tb", version=0, log_graph=True)
    assert fit(2, logger=logger, max_epochs=1, module=Drawn()).state.finished


def rows_of(text: str) -> tuple[list[str], int]:
    """Return the layers of each row of the table, and the sum of their parameters."""
    rows = [re.split("  +", line.strip()) for line in text.splitlines() if "convs." in line]
    return [row[1] for row in rows], sum(int(row[2].replace(",", "")) for row in rows)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("bars", [[], [TQDMProgressBar()]])
def test_the_stages_are_shown_once_with_the_summary(
    num_stages: int, bars: list[L.Callback], capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"enable_model_summary": True, "enable_progress_bar": bool(bars)}
    fit(num_stages, *bars, **options)
    shown = capfd.readouterr().out
    assert shown.count(f"Pipeline: 4 layers in {num_stages} stage") == 1
    one, two = ["convs.0 .. convs.3 (4)"], ["convs.0 .. convs.1 (2)", "convs.2 .. convs.3 (2)"]
    total = sum(p.numel() for p in make_module().parameters())
    assert rows_of(shown) == (one if num_stages == 1 else two, total)


def test_what_a_stage_computes_again_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    module = NodeClassifier(GCNII(NUM_FEATURES, 8, NUM_CLASSES, num_layers=3), NUM_CLASSES)
    fit(2, module=module, enable_model_summary=True)
    names = ["convs.0", "lin_in (repeated), convs.1 .. convs.2 (2)"]
    shown = capfd.readouterr().out
    assert rows_of(shown) == (names, sum(p.numel() for p in module.parameters()))


def test_the_stages_are_not_shown_without_the_summary(capfd: pytest.CaptureFixture[str]) -> None:
    fit(2)
    assert "Pipeline:" not in capfd.readouterr().out

"""The monitor's figures reach every logger, under fixed keys, and are the same on all ranks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, get_args

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_gnnpipe import PipelineMonitor, StalenessMonitor
from lightning_gnnpipe.callbacks import monitor
from lightning_gnnpipe.planning.closed_forms import pipeline_bytes
from lightning_gnnpipe.types import TrafficKind
from tests.helpers.observed import NUM_CLASSES, NUM_NODES, WIDTH, fit, make_module
from tests.helpers.steps import make_stats

SENT = ("forward", "backward", "output", "weight_grad")


def pipe_keys(num_stages: int) -> set[str]:
    stages = range(num_stages)
    return {
        "pipe/step_s",
        "pipe/bubble_frac",
        *(f"pipe/wait_s/stage_{s}" for s in stages),
        *(f"pipe/peak_memory_mib/stage_{s}" for s in stages),
        *(f"pipe/bytes/{kind}" for kind in get_args(TrafficKind)),
    }


def fit_csv(
    folder: Path, *callbacks: L.Callback, num_stages: int = 1, by: str = "pipe/step_s", **kw: Any
) -> list[dict[str, str]]:
    """Return the logged lines that have a figure."""
    fit(num_stages, *callbacks, logger=CSVLogger(folder, name="csv", version=0), **kw)
    with (folder / "csv/version_0/metrics.csv").open() as file:
        return [line for line in csv.DictReader(file) if line.get(by)]


class Keep(L.Callback):
    """Writes what each rank has logged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = {k: v.item() for k, v in trainer.callback_metrics.items() if "/" in k}
        (self.folder / f"rank_{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.filterwarnings("error:.*sync_dist=True")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_csv_has_all_figures_of_every_epoch(num_stages: int, tmp_path: Path) -> None:
    callbacks = PipelineMonitor(), StalenessMonitor(), Keep(tmp_path)
    lines = fit_csv(tmp_path, *callbacks, num_stages=num_stages, log_every_n_steps=1)
    assert [int(line["epoch"]) for line in lines] == [0, 1, 2]
    formula = pipeline_bytes(
        num_nodes=NUM_NODES,
        row_bytes=[WIDTH * 4] * (num_stages - 1),
        output_row_bytes=NUM_CLASSES * 4,
        weight_bytes=sum((p.numel() + 1) * 4 for p in make_module().net.parameters()),
    )
    for line in lines:
        assert {key for key in line if key.startswith("pipe/")} == pipe_keys(num_stages)
        value = {key: float(text) for key, text in line.items() if text}
        sent = sum(value[f"pipe/bytes/{kind}"] for kind in SENT)
        assert sent == formula
        waits = [value[f"pipe/wait_s/stage_{s}"] for s in range(num_stages)]
        assert all(0 <= wait < value["pipe/step_s"] < 60 for wait in waits)
        assert 0 <= value["pipe/bubble_frac"] < 1
        assert (sum(waits) > 0) == (value["pipe/bubble_frac"] > 0)
        assert 20 < value[f"pipe/peak_memory_mib/stage_{num_stages - 1}"] < 1e5
    assert float(lines[0]["history/stale_frac"]) == 0 < float(lines[1]["history/stale_frac"])
    first, *others = (json.loads(path.read_text()) for path in tmp_path.glob("rank_*.json"))
    assert pipe_keys(num_stages) <= first.keys()
    assert len(others) == num_stages - 1 and all(other == first for other in others)


def test_only_every_nth_epoch_is_logged_and_measured(tmp_path: Path) -> None:
    measured = []

    class Measured(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            measured.append(bool(trainer.strategy.collect_staleness()))

    both = PipelineMonitor(every_n_epochs=2), StalenessMonitor(every_n_epochs=2)
    lines = fit_csv(tmp_path, *both, Measured(), max_epochs=5)
    assert [int(line["epoch"]) for line in lines] == [1, 3]
    assert measured == [False, True, False, True, False]


def test_large_counts_of_bytes_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2**40 + 1
    stats = make_stats("F0 B0", bytes_by_kind={"forward": count})
    monkeypatch.setattr("lightning_gnnpipe.GNNPipeStrategy.collect_stats", lambda *_: stats)
    [line] = fit_csv(tmp_path, PipelineMonitor(), max_epochs=1)
    assert float(line["pipe/bytes/forward"]) == count
    assert float(line["pipe/peak_memory_mib/stage_0"]) == 2**20 / monitor._MIB

"""The timeline of the chosen epoch is written once, by the first rank, and given to loggers."""

from __future__ import annotations

import io
import json
import logging
from itertools import product
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib import image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_gnnpipe import TimelineCallback
from tests.helpers.observed import fit


def actions_in(path: Path) -> list[tuple[int, str, int]]:
    """Return the stage, direction and chunk of each action of a trace."""
    events = [
        e for e in json.loads(path.read_text())["traceEvents"] if "chunk" in e.get("args", {})
    ]
    return sorted((e["args"]["stage"], e["name"][0], int(e["name"][1:])) for e in events)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_chosen_epoch_is_drawn_and_traced(num_stages: int, tmp_path: Path) -> None:
    """Epoch 0 is exact: one chunk; in epoch 1 there are four, forth and back on each stage."""
    folder = tmp_path / "new"
    callbacks = [TimelineCallback(epoch, folder) for epoch in (0, 1)]
    fit(num_stages, *callbacks)
    files = sorted(path.name for path in folder.iterdir())
    assert files == [f"timeline_epoch_{e}.{kind}" for e in (0, 1) for kind in ("json", "png")]
    for epoch, num_chunks in enumerate((1, 4)):
        found = actions_in(folder / f"timeline_epoch_{epoch}.json")
        assert found == sorted(product(range(num_stages), "BF", range(num_chunks)))
    assert image.imread(folder / "timeline_epoch_1.png").shape[1] >= 1200


def test_the_last_epoch_is_drawn_by_default(tmp_path: Path) -> None:
    callback = TimelineCallback()
    fit(1, callback, default_root_dir=tmp_path)
    assert callback.png_path == tmp_path / "timeline_epoch_2.png"
    assert callback.png_path.is_file()
    assert callback.trace_path == tmp_path / "timeline_epoch_2.json"


def test_files_lie_with_the_first_logger_and_tensorboard_shows_the_picture(tmp_path: Path) -> None:
    loggers = CSVLogger(tmp_path, version=0), TensorBoardLogger(tmp_path, name="tb", version=0)
    fit(2, TimelineCallback(1), logger=loggers)
    assert (tmp_path / "lightning_logs/version_0/timeline_epoch_1.png").is_file()
    events = EventAccumulator(str(tmp_path / "tb/version_0"), size_guidance={"images": 0})
    events.Reload()
    [shown] = events.Images("pipe/timeline")
    pixels = image.imread(io.BytesIO(shown.encoded_image_string))
    assert pixels.shape[:2] == (shown.height, shown.width)
    assert len({tuple(pixel) for pixel in pixels[::4, ::4, :3].reshape(-1, 3).tolist()}) > 3


def test_an_epoch_that_never_came_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lightning_gnnpipe"):
        fit(1, TimelineCallback(7, tmp_path))
    assert "trained no step of epoch 7" in caplog.text
    assert not list(tmp_path.iterdir())

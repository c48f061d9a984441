"""The picture of a step shows each chunk where it was, phases and idle time; profilers show them.

It is drawn once, by the first rank, for the chosen epoch, and given to loggers.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import PyTorchProfiler
from matplotlib import image
from matplotlib.colors import to_rgb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_gnnpipe import TimelineCallback
from lightning_gnnpipe.callbacks import timeline
from lightning_gnnpipe.callbacks.timeline import (
    BACKWARD,
    FORWARD,
    IDLE,
    describe_step,
    draw_timeline,
)
from tests.helpers.observed import fit
from tests.helpers.steps import make_stats


def share_of(colour: str, pixels: Any) -> float:
    return float((abs(pixels[..., :3] - to_rgb(colour)).max(axis=2) < 0.01).mean())


def test_forward_backward_and_idle_time_take_their_share_of_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slots forward, two backward, three idle; the slot of the loss stays white."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # it is left alone
    stats = make_stats("F0 F1 .. B1 ..", "F0 .. .. .. B0")
    draw_timeline(stats.events, "").savefig(tmp_path / "step.png", dpi=150)
    pixels = image.imread(tmp_path / "step.png")
    forward, backward, idle = (share_of(colour, pixels) for colour in (FORWARD, BACKWARD, IDLE))
    assert forward / backward == pytest.approx(3 / 2, rel=0.15)
    assert idle / backward == pytest.approx(3 / 2, rel=0.15)


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_chunk_is_numbered_where_there_is_room() -> None:
    """40 chunks forth and back: the picture becomes wide enough for 160 numbers."""
    row = " ".join([*(f"F{c}" for c in range(40)), "..", *(f"B{c}" for c in reversed(range(40)))])
    figure = draw_timeline(make_stats(row, row, num_chunks=40).events, "")
    assert sorted(texts(figure)) == sorted([*map(str, range(40))] * 4 + ["outputs, loss"])
    assert figure.get_figwidth() > 14
    row = " ".join([*(f"F{c}" for c in range(1500))])
    assert texts(draw_timeline(make_stats(row).events, "")) == []


def test_axes_and_titles_have_names_units_and_the_bubble_share() -> None:
    axes = draw_timeline(make_stats("F0 B0", ".. F0 .. B0").events, "my title").axes[0]
    assert axes.get_xlabel().startswith("time in the training step [ms]")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_title(loc="left") == "my title"
    assert axes.get_xlim() == pytest.approx((0, 0.4))
    stats = make_stats("F0 F1 .. .. B1 B0", ".. F0 F1 B1 B0 ..")
    assert describe_step(stats) == "2 stages, 2 chunks, bubble share 33.3% (at best 33.3%)"
    assert describe_step(make_stats("F0 B0", num_chunks=1)).startswith("1 stage, 1 chunk, bubble")


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_chosen_epoch_or_the_last_is_drawn(num_stages: int, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    fit(num_stages, *(TimelineCallback(epoch, folder) for epoch in (0, 1, None)))
    files = sorted(path.name for path in folder.iterdir())
    assert files == [f"timeline_epoch_{epoch}.png" for epoch in range(3)]
    assert image.imread(folder / "timeline_epoch_1.png").shape[1] >= 1200


def test_an_epoch_that_will_not_come_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(timeline.log, "warning", lambda text, *args: told.append(text % args))
    callbacks = [TimelineCallback(3, tmp_path), TimelineCallback(None, tmp_path)]
    fit(1, *callbacks, max_epochs=3)
    begin, end = told
    assert begin == "No timeline will be drawn of epoch 3: the run has max_epochs=3."
    assert "no step of epoch 3 ran in the pipeline" in end


def test_profilers_show_every_chunk_by_name(tmp_path: Path) -> None:
    """Epoch 0 is exact: one chunk; in epochs 1 and 2 there are four, forth and back."""
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile", schedule=None)
    fit(2, profiler=profiler)
    for rank, path in enumerate(sorted(tmp_path.glob("*.json"))):
        found = [one["name"] for one in json.loads(path.read_text())["traceEvents"]]
        for phase, chunk in product(("forward", "backward"), range(4)):
            assert f"{phase} stage {rank} chunk {chunk}" in found
    assert len(list(tmp_path.glob("*.json"))) == 2


class Wandb(WandbLogger):
    """Keeps the pictures that it is given, where wandb would start a service."""

    name = version = save_dir = experiment = None
    log_metrics = log_hyperparams = save = finalize = lambda *_, **__: None

    def __init__(self) -> None:
        self.images = list[Any]()

    def log_image(self, key: str, images: list[Any], step: int | None = None, **_: Any) -> None:
        self.images.append((key, images, step))


def test_wandb_is_given_the_picture(tmp_path: Path) -> None:
    logger, callback = Wandb(), TimelineCallback(1, tmp_path)
    fit(1, callback, logger=logger)
    assert logger.images == [("pipe/timeline", [str(callback.png_path)], 2)]


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
    assert "no step of epoch 7 ran in the pipeline" in caplog.text
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gnnpipe.callbacks.timeline.find_spec", lambda name: None)
    text = r"Expected the package 'matplotlib'.*pip install matplotlib"
    with pytest.raises(ImportError, match=text):
        TimelineCallback()

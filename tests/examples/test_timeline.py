"""The timeline picture shows forward and backward actions, and only those."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from matplotlib import image
from matplotlib.colors import to_rgb
from timeline import BACKWARD, FORWARD, IDLE, draw_timeline


@dataclass
class Box:
    rank: int
    action: str
    start_us: float
    end_us: float


def share_of(colour: str, pixels) -> float:
    return float((abs(pixels[..., :3] - to_rgb(colour)).max(axis=2) < 0.01).mean())


def test_forward_backward_and_idle_time_take_their_share_of_the_picture(tmp_path):
    """rank 0: F F B .  - a quarter each of the row is idle; twice as much forward as backward."""
    boxes = [Box(0, "0F0", 0, 100), Box(0, "0F1", 100, 200), Box(0, "0B1", 200, 300)]
    boxes += [Box(1, "1F0", 0, 100), Box(1, "1B0", 300, 400)]
    draw_timeline(boxes, tmp_path / "new" / "timeline.png", "two ranks")
    pixels = image.imread(tmp_path / "new" / "timeline.png")
    forward, backward, idle = (share_of(colour, pixels) for colour in (FORWARD, BACKWARD, IDLE))
    assert forward / backward == pytest.approx(3 / 2, rel=0.15)
    assert idle / backward == pytest.approx(3 / 2, rel=0.15)


def test_a_trace_without_compute_is_refused(tmp_path):
    with pytest.raises(ValueError, match="forward or backward actions"):
        draw_timeline([Box(0, "0SEND1", 0, 1)], tmp_path / "timeline.png", "")

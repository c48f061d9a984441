"""Reports of a pipeline: table of stages, picture and trace of a training step."""

from __future__ import annotations

from lightning_gnnpipe.report.gantt import (
    check_matplotlib,
    chrome_trace,
    draw_timeline,
    timeline_title,
)
from lightning_gnnpipe.report.stages import StageRow, describe_stages, format_stages

__all__ = [
    "StageRow",
    "check_matplotlib",
    "chrome_trace",
    "describe_stages",
    "draw_timeline",
    "format_stages",
    "timeline_title",
]

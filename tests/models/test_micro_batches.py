"""The networks for mini-batches of graphs, in micro-batches on stages: equal to plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vig import PixelViG, ViG

from lightning_gnnpipe.models import GIN
from tests.helpers.batches import (
    NUM_EDGE_FEATURES,
    NUM_FEATURES,
    NUM_TARGETS,
    ODD_SIZES,
    SIZES,
    GraphModule,
    draw_batch,
)
from tests.helpers.launch import FitResult, fit_batches
from tests.helpers.record import assert_steps_equal

OF_GRAPH = ("x", "edge_index", "batch")
INPUTS = {"gin": (*OF_GRAPH, "edge_attr"), "vig": ("x", "batch"), "pixelvig": OF_GRAPH}
ENDS = NUM_FEATURES, 8, NUM_TARGETS
CONVS = "max_relative", "edge", "gin", "sage"


def build(name: str) -> nn.Module:
    if name == "gin":
        return GIN(*ENDS, 4, 0.0, edge_channels=NUM_EDGE_FEATURES, virtual_node=True, jk="cat")
    if name.startswith("vig"):
        return ViG(*ENDS, 3, num_neighbours=3, conv=name.removeprefix("vig "))
    widths = dict(grapher_channels=8, feed_forward_channels=8, head_channels=8)
    return PixelViG(NUM_FEATURES, NUM_TARGETS, 3, **widths)


BATCHES = [draw_batch(SIZES, seed) for seed in range(3)]
ODD = [draw_batch(sizes) for sizes in (SIZES, *ODD_SIZES.values())]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["gin", *(f"vig {conv}" for conv in CONVS), "pixelvig"])
@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "batches"), [(1, 5, BATCHES), (3, 4, BATCHES), (1, 4, ODD)]
)
def test_stages_equal_plain_lightning(
    name: str, num_stages: int, num_chunks: int, batches: list[Any], tmp_path: Path
) -> None:
    def fit(**options: int) -> FitResult:
        torch.manual_seed(5)
        module = GraphModule(net=build(name), inputs=INPUTS[name.partition(" ")[0]])
        return fit_batches(module, batches, tmp_path=tmp_path, **options)

    plain, piped = fit(), fit(num_stages=num_stages, num_chunks=num_chunks)
    assert_steps_equal(piped.steps, plain.steps)

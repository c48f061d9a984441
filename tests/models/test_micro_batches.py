"""The networks for mini-batches of graphs, in micro-batches on stages: equal to plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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

TENSORS = {"gin": ("x", "edge_index", "batch", "edge_attr"), "vig": ("x", "batch")}
ENDS = NUM_FEATURES, 8, NUM_TARGETS


def build(name: str) -> nn.Module:
    if name == "gin":
        return GIN(*ENDS, 4, 0.0, edge_channels=NUM_EDGE_FEATURES, virtual_node=True, jk="cat")
    if name == "vig":
        return ViG(*ENDS, 3, num_neighbours=3)
    widths = dict(grapher_channels=8, feed_forward_channels=8, head_channels=8)
    return PixelViG(NUM_FEATURES, NUM_TARGETS, 3, **widths)


class Module(GraphModule):
    """Regression by a network that takes bare tensors."""

    def __init__(self, name: str) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            super().__init__(net=build(name))
        self.tensors = TENSORS.get(name, ("x", "edge_index", "batch"))

    def forward(self, data: Any) -> Tensor:
        return self.net(*(data[name] for name in self.tensors))


BATCHES = [draw_batch(SIZES, seed) for seed in range(3)]
ODD = [draw_batch(sizes) for sizes in (SIZES, *ODD_SIZES.values())]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["gin", "vig", "pixelvig"])
@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "batches"), [(1, 5, BATCHES), (3, 4, BATCHES), (1, 4, ODD)]
)
def test_stages_equal_plain_lightning(
    name: str, num_stages: int, num_chunks: int, batches: list[Any], tmp_path: Path
) -> None:
    def fit(**options: int) -> FitResult:
        return fit_batches(Module(name), batches, tmp_path=tmp_path, **options)

    plain, piped = fit(), fit(num_stages=num_stages, num_chunks=num_chunks)
    assert_steps_equal(piped.steps, plain.steps)
    if num_stages > 1:  # no rank did the whole work
        assert all(held < set(plain.steps[0].weights) for held in piped.held_by_rank)

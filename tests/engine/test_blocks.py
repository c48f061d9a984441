"""Blocks of layers: how they are dealt out, and what waits between them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe import BlockGradients, DelayedGradients, GNNPipeStrategy, StalenessMethod
from lightning_gnnpipe.engine.blocks import block_cuts, block_sizes, whole_blocks
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.history import LateGradients
from tests.helpers.graphs import communities
from tests.helpers.launch import run_fit
from tests.helpers.modules import ReferenceModule


@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "sizes", "cuts"),
    [
        (32, 2, (16, 16), (16,)),
        (32, 3, (10, 11, 11), (10, 21)),
        (3, 2, (1, 2), (1,)),
        (3, 9, (1, 1, 1), (1, 2)),
        (5, 1, (5,), ()),
    ],
)
def test_blocks_are_alike_but_for_one_layer(
    num_layers: int, num_blocks: int, sizes: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    assert block_sizes(num_layers, num_blocks) == sizes
    assert block_cuts(num_layers, num_blocks) == cuts


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "counts"),
    [
        (2, 2, (16, 16)),
        (4, 2, (16, 16)),
        (3, 2, (21, 11)),
        (5, 1, (32,)),
        (2, 3, None),
        (0, 1, None),
    ],
)
def test_stages_get_whole_blocks(
    num_blocks: int, num_stages: int, counts: tuple[int, ...] | None
) -> None:
    assert whole_blocks(32, num_blocks, num_stages) == counts


def grads(value: float) -> dict[str, Tensor]:
    return {"h": torch.full((2, 1), value)}


def taken(late: LateGradients) -> float | None:
    found = late.take(4)
    return None if found is None else float(found["h"][0])


def test_what_is_late_is_carried_forward() -> None:
    """1, 3, 4: taken are 1 (nothing before it), 3 + 0.5 (3 - 1), 4 + 0.5 (4 - 3)."""
    late = LateGradients(BlockGradients(2, lead=0.5))
    found = []
    for value in (1.0, 3.0, 4.0):
        found.append(taken(late))
        late.put(4, grads(value))
        late.end_step(is_exact=False)
    assert [*found, taken(late)] == [None, 1, 4, 4.5]


def test_what_is_late_follows_the_loss_scale() -> None:
    late = LateGradients(BlockGradients(2, lead=0.5))
    for value in (1.0, 3.0):
        late.put(4, grads(value))
        late.end_step(is_exact=False)
    late.rescale(2.0)
    assert taken(late) == 8
    late.rescale(None)
    assert taken(late) is None


def test_an_exact_step_leaves_nothing() -> None:
    late = LateGradients(BlockGradients(2))
    late.put(4, grads(1.0))
    late.end_step(is_exact=False)
    late.end_step(is_exact=True)
    assert taken(late) is None and late.save() == {}


def test_what_is_saved_goes_on_alike() -> None:
    late, other = (LateGradients(BlockGradients(2, lead=0.5)) for _ in range(2))
    for value in (1.0, 3.0):
        late.put(4, grads(value))
        late.end_step(is_exact=False)
    other.load(late.save())
    assert taken(other) == taken(late) == 4
    other.rescale(2.0)
    assert taken(late) == 4  # no tensor in common


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "'num_blocks' of BlockGradients to be at least 1"),
        ({"num_blocks": True}, "'num_blocks' of BlockGradients to be at least 1"),
        ({"num_blocks": 1.5}, "'num_blocks' of BlockGradients to be at least 1"),
        ({"lead": -0.1}, "'lead' of BlockGradients to be from 0 to 1"),
        ({"lead": float("nan")}, "'lead' of BlockGradients to be from 0 to 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockGradients(**options)


def test_an_encoder_is_not_computed_again() -> None:
    with pytest.raises(ConfigError, match="'repeat_encoder' to be 'auto' or False"):
        GNNPipeStrategy(staleness="blocks", repeat_encoder=True)
    GNNPipeStrategy(staleness=StalenessMethod(DelayedGradients()), repeat_encoder=True)


@pytest.mark.parametrize(("num_blocks", "warns"), [(2, True), (3, False), (4, False)])
def test_stages_that_share_a_block_are_told(num_blocks: int, warns: bool, tmp_path: Path) -> None:
    """Once, by the first rank."""
    case = communities(5)
    log, handler = logging.getLogger("lightning_gnnpipe"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    try:
        run_fit(
            ReferenceModule("gcn"),
            case.data,
            num_stages=3,
            num_chunks=5,
            partition=case.partition,
            max_epochs=1,
            tmp_path=tmp_path,
            strategy_kwargs={"staleness": StalenessMethod(BlockGradients(num_blocks))},
        )
    finally:
        log.removeHandler(handler)
        handler.close()
    assert (tmp_path / "log").read_text().count("share a block") == warns

"""The longest rows have more bits; all else is as the codec of the rest sends it."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_gnnpipe.comm import get_codec
from lightning_gnnpipe.comm.drive import DriveCodec
from lightning_gnnpipe.comm.long_rows import LongRowsCodec
from tests.helpers.codecs import FLOATS, random, through


def make() -> LongRowsCodec:
    return LongRowsCodec("both", get_codec("int1"), get_codec("bf16"))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(100, 40), (65, 3, 11)])
def test_the_longest_row_of_32_has_more_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = random(*shape, dtype=dtype)
    long = [7, 50, 64][: shape[0] // 32]
    rows[long] *= 100
    found, few = through(make(), rows, 3), through(get_codec("int1"), rows, 3)
    is_long = torch.zeros(shape[0], dtype=torch.bool).index_fill(0, torch.tensor(long), True)
    assert torch.equal(found[is_long], through(get_codec("bf16"), rows[is_long]))
    assert torch.equal(found[~is_long], few[~is_long])


def test_messages_of_few_rows_are_those_of_the_rest() -> None:
    for rows in (random(31, 20), random(5), random(0, 20)):
        assert torch.equal(make().encode(rows, 1), get_codec("int1").encode(rows, 1))


def test_the_error_of_gradients_is_that_of_short_rows() -> None:
    """Rows whose lengths differ as those of gradients do: the ten longest are a third of them."""
    rows = random(320, 64) * torch.logspace(0, -3, 320)[:, None]
    error = (through(get_codec("drive"), rows) - rows).square().sum() / rows.square().sum()
    rest = rows.square().sum(1)[10:].sum() / rows.square().sum()
    assert error < 0.6 * rest + 0.05


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "num_parts"), [((40, 256), 1), ((40, 4, 75), 2), ((40, 257), 2), ((7, 1433), 6)]
)
def test_wide_rows_are_several(shape: tuple[int, ...], num_parts: int, dtype: torch.dtype) -> None:
    """Each part has what was sent in it once, up to the four bits that some have."""
    rows = random(*shape).pow(5).to(dtype)
    found = through(get_codec("drive"), rows).double()
    rows = rows.double()
    assert (found - rows).norm() < 0.85 * rows.norm()
    width = -(-math.prod(shape[1:]) // num_parts)
    for part, sent in zip(
        found.view(shape[0], -1).split(width, 1),
        rows.view(shape[0], -1).split(width, 1),
        strict=True,
    ):
        shares = (part * sent).sum(1) / sent.square().sum(1)
        assert (shares - 1).abs().median() < 1e-2


@pytest.mark.parametrize("num_channels", [128, 256])
def test_more_bits_are_better_however_heavy_a_rows_tail(num_channels: int) -> None:
    rows = random(64, num_channels) ** 5
    longest = rows.norm(dim=1).topk(2).indices
    few, more = (
        ((through(codec, rows) - rows).norm(dim=1) / rows.norm(dim=1)).square()[longest]
        for codec in (DriveCodec(), get_codec("drive"))
    )
    assert more.max() < 0.35 < 0.45 < few.min()


def test_wide_rows_in_any_layout_of_memory_are_taken() -> None:
    rows = random(40, 512)
    assert torch.equal(
        get_codec("drive").encode(rows.t().contiguous().t(), 3), get_codec("drive").encode(rows, 3)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_takes_no_more_than_its_own_place(bad: float) -> None:
    rows = random(96, 20)
    rows[[3, 40]] *= 1e3
    rows[7, 2] = bad
    found, few = through(make(), rows), through(get_codec("int1"), rows)
    assert set((found != few).any(1).nonzero().flatten().tolist()) == {3, 7, 40}


@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_the_longest_are_found_whatever_the_unit(factor: float) -> None:
    rows = random(64, 20) * factor
    rows[[3, 40]] *= 1e3
    found, few = through(make(), rows), through(get_codec("int1"), rows)
    changed = (found != few).any(1).nonzero().flatten()
    assert changed.tolist() == [3, 40]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_not_hidden(bad: float) -> None:
    rows = random(64, 20)
    rows[5, 2] = rows[9, 0] = rows[11, 1] = bad  # more than are sent apart
    is_bad = rows.isfinite().logical_not().any(1)
    found = through(get_codec("drive"), rows)
    assert not bool(found[is_bad].isfinite().any())
    assert bool(found[~is_bad].isfinite().all())

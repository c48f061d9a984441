"""Signs of turned rows: right on average for any row, the same error for all, nothing hidden."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe.comm import Codec, get_codec
from lightning_gnnpipe.comm import rows as rows_module
from lightning_gnnpipe.comm.drive import DriveCodec
from tests.helpers.codecs import FLOATS, check_not_hidden, random, through

BLOCK = 2**16  # values that the codec takes at a time


def error_shares(rows: Tensor, codec: Codec) -> Tensor:
    """Return `[num_rows]`, float64: the squared error of each row over its squared length."""
    error = through(codec, rows).double() - rows.double()
    return error.square().sum(1) / rows.double().square().sum(1)


def test_blocks_are_those_that_the_tests_are_about() -> None:
    assert rows_module.BLOCK_CPU == BLOCK


@pytest.mark.parametrize("num_channels", [2, 5, 17])
def test_one_bit_is_right_on_average(num_channels: int) -> None:
    """Whatever the row: dense, one or two values that are all of it, tiny, large, far from 0."""
    num_draws = 2000
    codec = DriveCodec()
    rows = random(7, num_channels)
    rows[1] = torch.eye(num_channels)[1]
    rows[2] = 3 * torch.eye(num_channels)[0] + torch.eye(num_channels)[1]
    rows[3] *= 1e-30
    rows[4] *= 1e30
    rows[5] += 10
    rows[6] = rows[6] ** 5
    first, second = torch.zeros(2, *rows.shape, dtype=torch.float64)
    for draw in range(num_draws):  # one row of a message, and a rotation for each
        messages = [row.expand(6, -1) for row in rows]  # one row of 2 channels is sent as it is
        alone = [through(codec, same, 7 * draw + i << 8)[0] for i, same in enumerate(messages)]
        found = torch.stack(alone).double()
        first += found / num_draws
        second += found**2 / num_draws
    # No value deviates by less than a row's do: take a tenth of that where few draws have told.
    length = rows.double().square().sum(1, True).sqrt()
    deviation = (second - first**2).clamp(min=0).sqrt().maximum(0.1 * length / num_channels**0.5)
    z = (first - rows.double()).abs() / deviation * num_draws**0.5
    assert z.max() < 5.0
    degrees = rows.size(0) * (num_channels - 1)  # along the row itself there is no error
    assert z.square().mean() < 1 + 4 * (2 / degrees) ** 0.5


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_comes_out_has_the_row_in_it_once(dtype: torch.dtype) -> None:
    """Several blocks, the last one not full, and signs that do not fill the last byte."""
    rows = random(2 * BLOCK // 35, 35, dtype=dtype)
    rows *= 10.0 ** torch.arange(rows.size(0)).remainder(4)[:, None]
    found = through(DriveCodec(), rows).double()
    share = (found * rows.double()).sum(1) / rows.double().square().sum(1)
    bound = 1e-5 if dtype.itemsize > 2 else 35**0.5 * torch.finfo(dtype).eps
    assert (share - 1).abs().max() < bound


def test_the_error_is_that_of_the_paper_for_any_row() -> None:
    rows = random(2000, 128)
    heavy = rows**5  # as gradients are: few values are most of a row
    for one in (rows, heavy, rows.relu()):
        assert error_shares(one, DriveCodec()).mean() == pytest.approx(math.pi / 2 - 1, abs=0.02)
        assert error_shares(one, DriveCodec()).max() < 1.2
    assert error_shares(heavy, get_codec("int1")).mean() > 3


def test_rows_that_are_alike_have_errors_of_their_own() -> None:
    """Sums over neighbours average them out."""
    rows = random(1, 128).expand(400, 128)
    error = through(DriveCodec(), rows).double() - rows
    of_one = error.square().sum(1).mean()
    of_mean = error.mean(0).square().sum()
    assert of_mean < 2 * of_one / 400


def test_all_of_a_message_takes_other_numbers_in_the_next() -> None:
    codec, rows = DriveCodec(), random(300, 300)
    first = through(codec, rows, 11)
    assert torch.equal(first, through(codec, rows, 11 + 2**32))
    assert bool((first != through(codec, rows, 12)).any(1).all())


def test_automatic_mixed_precision_is_not_for_rotations() -> None:
    rows = random(50, 40)
    expected = through(DriveCodec(), rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(through(DriveCodec(), rows), expected)


def test_rows_of_nothing_stay_so() -> None:
    rows = random(5, 40)
    rows[1:3] = 0
    assert bool((through(DriveCodec(), rows)[1:3] == 0).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_not_hidden(bad: float, dtype: torch.dtype) -> None:
    codec = DriveCodec()
    check_not_hidden(codec, bad, dtype)


def test_what_a_type_cannot_hold_is_not_hidden() -> None:
    long = torch.full((2, 64), 3e38)
    long[1] /= 1e6
    found = through(DriveCodec(), long)
    assert not bool(found[0].isfinite().any()) and bool(found[1].isfinite().all())
    huge = torch.full((1, 64), 1e300, dtype=torch.float64)
    assert not bool(through(DriveCodec(), huge).isfinite().any())
    short = torch.full((1, 64), 6e4, dtype=torch.float16)  # a tenth of them is larger than 65504
    found = through(DriveCodec(), short)
    assert bool(found.isinf().any()) and not bool(found.isnan().any())
    tiny = torch.full((1, 64), 2.0**-140)  # below what has an inverse
    share = (through(DriveCodec(), tiny) / tiny).mean()
    assert share == pytest.approx(1, abs=0.01)

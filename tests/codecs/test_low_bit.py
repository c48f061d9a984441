"""Few bits: no value moves by a step, all are right on average, what is not finite shows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe.codecs import low_bit
from lightning_gnnpipe.codecs.codec import get_codec
from tests.helpers.codecs import FLOATS, LOW_BITS, random, steps_of, through

BLOCK = low_bit.BLOCK_CPU  # values that a codec takes at a time


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_bits", LOW_BITS)
def test_no_value_moves_by_a_step(num_bits: int, dtype: torch.dtype) -> None:
    """Several blocks, the last one not full, and codes that do not fill the last byte."""
    rows = random(2 * BLOCK // 35, 35, dtype=dtype)  # odd sizes
    rows *= 10.0 ** torch.arange(rows.size(0)).remainder(4)[:, None]
    found = through(get_codec(f"int{num_bits}"), rows)
    error = (found.double() - rows.double()).abs()
    rounding = rows.double().abs().amax(1, True) * 2 * torch.finfo(found.dtype).eps
    assert bool((error <= steps_of(rows, num_bits) * 1.0001 + rounding).all())


@pytest.mark.parametrize("num_bits", LOW_BITS)
def test_few_bits_are_right_on_average(num_bits: int) -> None:
    """Mean and variance over many seeds, for rows near to zero, far from it, and tiny."""
    num_draws = 3000
    codec = get_codec(f"int{num_bits}")
    rows = random(6, 50)
    rows[1] += 100
    rows[2] *= 1e-9  # as gradients are
    rows[3] = rows[3].relu()
    rows[4] *= 1e30
    rows[5] = 0.1 + rows[5] * 1e-9  # within one step of the 16-bit ends
    first, second = torch.zeros(6, 50).double(), torch.zeros(6, 50).double()
    values = [set() for _ in range(6)]
    for seed in range(num_draws):
        found = through(codec, rows, seed).double()
        first += found / num_draws
        second += found**2 / num_draws
        for row, seen in zip(found, values, strict=True):
            seen.update(row.tolist())
    assert all(2 <= len(seen) <= 2**num_bits for seen in values)
    deviation = (second - first**2).clamp(min=0).sqrt()
    # A value next to an end is rarely rounded away from it: take the deviation of chance 1/300.
    steps = torch.tensor([(max(seen) - min(seen)) / (2**num_bits - 1) for seen in values])
    error = (first - rows.double()).abs() / (deviation.maximum(steps[:, None] / 300**0.5))
    z = error * num_draws**0.5
    assert z.max() < 5.0  # 300 values: beyond 4.7 once in 1000 tries
    assert z.square().mean() < 1.3


def test_errors_of_any_two_values_are_uncorrelated() -> None:
    """Rows a block apart share random numbers: the variance of their sum must not tell."""
    num_draws = 400
    rows_per_block = BLOCK // 8192
    rows = random(2 * rows_per_block, 8192).clamp(-1, 1)
    codec = get_codec("int1")
    products = []
    for seed in range(num_draws):
        first, second = (through(codec, rows, seed) - rows).view(2, rows_per_block, 8192)
        # of rows a block apart, the next row, the next channel, and both
        others = (second, first.roll(1, 0), first.roll(1, 1), second.roll(1, 1))
        products.append(torch.stack([(first * other).mean(1) for other in others]))
    found = torch.stack(products).double()  # [num_draws, 4, rows_per_block]
    z = found.mean(0) / found.std(0) * num_draws**0.5
    assert z.abs().max() < 4.5


@pytest.mark.parametrize("num_bits", LOW_BITS)
@pytest.mark.parametrize("value", [0.0, -0.5, 96.0, 65504.0, 2.0**-130])
def test_constant_rows_that_16_bits_can_hold_are_exact(num_bits: int, value: float) -> None:
    for dtype in [torch.float16] if value == 65504.0 else [torch.float32, torch.float64]:
        rows = torch.full((4, 21), value, dtype=dtype)
        assert torch.equal(through(get_codec(f"int{num_bits}"), rows), rows)


@pytest.mark.parametrize("num_bits", LOW_BITS)
def test_the_largest_value_is_never_rounded_up(
    num_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no code for it: it would run over into the next one's bits."""
    draws = iter([2**24 - 1, 0])  # the largest random number, and a key that leaves it

    def draw(count: int, generator: torch.Generator) -> Tensor:
        return torch.full((count,), next(draws), dtype=torch.int32)

    monkeypatch.setattr(low_bit, "_draw", draw)
    high = 1 + torch.arange(100.0) * 2.0**-3  # 16 bits hold all of them below 16
    rows = torch.zeros(100, 24)
    rows[:, 1::2] = high[:, None]
    found = through(get_codec(f"int{num_bits}"), rows)
    assert bool(((found - rows).abs() <= 1e-6 * high[:, None]).all())


def test_rows_shorter_than_float32_can_divide_by_are_right_on_average() -> None:
    rows = torch.full((1, 8192), 2.0**-122)
    rows[0, 0] = 0
    for num_bits in LOW_BITS:
        found = through(get_codec(f"int{num_bits}"), rows) * 2.0**122
        assert abs(found.mean() - 1) < 5 * (31 / 8192) ** 0.5  # at most 32, with a chance of 1/32
        assert found[0, 0] == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_bits", LOW_BITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_not_hidden(
    bad: float, num_bits: int, dtype: torch.dtype
) -> None:
    codec, rows = get_codec(f"int{num_bits}"), random(9, 13, dtype=dtype)
    expected = through(codec, rows)
    is_bad = torch.arange(9) % 4 == 0
    rows[0, 0] = rows[4, 3] = rows[4, 12] = rows[8, :] = bad
    found = through(codec, rows)
    assert bool(found[is_bad].isnan().all())
    assert torch.equal(found[~is_bad], expected[~is_bad])


@pytest.mark.parametrize("num_bits", LOW_BITS)
def test_what_floats_cannot_span_is_not_hidden_and_what_they_can_is_finite(num_bits: int) -> None:
    codec = get_codec(f"int{num_bits}")
    found = through(codec, torch.tensor([[3e38, -3e38, 0.0], [1e38, -1e38, 0.0]]))
    assert bool(found[0].isnan().all()) and bool(found[1].isfinite().all())
    assert bool(through(codec, torch.tensor([[1e300, 1.0, 0.0]]).double()).isnan().all())
    rows = torch.tensor([[65504.0, -65504.0, 65504.0, 0.0] * 8], dtype=torch.float16)
    assert bool(through(codec, rows).isfinite().all())

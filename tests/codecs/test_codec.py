"""Codecs: sizes known beforehand, exact where promised, right at any shape, dtype and place.

With few bits no value moves by a step, all are right on average, and what is not finite shows.
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_gnnpipe.codecs import Codec, get_codecs, low_bit
from lightning_gnnpipe.codecs.codec import get_codec
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.types import CodecOption

LOW_BITS = [1, 8]
NAMES = ["fp32", "bf16", *(f"int{bits}" for bits in LOW_BITS)]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def through(codec: Codec, tensor: Tensor, seed: int = 0) -> Tensor:
    """Return what arrives of `tensor`."""
    payload = codec.encode(tensor, seed)
    assert payload.dtype == torch.uint8 and payload.dim() == 1
    assert payload.numel() == codec.payload_bytes(tensor.shape, tensor.dtype)
    out = torch.full_like(tensor, 7)
    landing = codec.landing_for(out)
    assert landing.shape == payload.shape
    landing.copy_(payload)
    codec.decode(landing, out)
    return out


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def steps_of(rows: Tensor, num_bits: int) -> Tensor:
    """Return the longest step that each row may have: `[num_rows, 1]`, float64."""
    low, high = rows.double().amin(1, True), rows.double().amax(1, True)
    if rows.element_size() > 2:  # each end moves by less than 2**-7 of itself
        low, high = low - low.abs() / 128, high + high.abs() / 128
    return (high - low) / (2**num_bits - 1)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        ("fp32", (10, 256), torch.float32, 10 * 1024),
        ("bf16", (10, 256), torch.float32, 10 * 512),
        ("int8", (10, 256), torch.float32, 10 * (4 + 256)),
        ("int1", (10, 256), torch.bfloat16, 10 * (4 + 32)),
        ("int1", (3, 5), torch.float32, 3 * 4 + 2),  # 15 bits, without gaps between rows
        ("int1", (3, 2, 3), torch.float32, 3 * 4 + 3),  # channels are all that is not a row
        ("int8", (10, 1), torch.float32, 10 * 4),  # as it is: coded, it would have 5 bytes a row
        ("int8", (10, 1), torch.float64, 10 * 5),
        ("int1", (10, 2), torch.bfloat16, 10 * 4),
        ("int1", (10, 256), torch.int64, 10 * 2048),
        ("int1", (0, 256), torch.float32, 0),
        ("int1", (10, 0), torch.float32, 0),
        ("int1", (), torch.float32, 4),
    ],
)
def test_p5_the_size_of_a_payload_is_known_from_the_shape(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, expected: int
) -> None:
    codec = get_codec(name)
    assert codec.name == name
    assert codec.payload_bytes(shape, dtype) == expected
    tensor = random(*shape).mul(3).to(dtype)
    assert codec.encode(tensor, 0).numel() == expected


@given(
    name=st.sampled_from(NAMES),
    shape=st.lists(st.integers(0, 9), max_size=3).map(
        lambda sizes: [8 * n for n in sizes[:1]] + sizes[1:]
    ),
    dtype=st.sampled_from([*FLOATS, torch.int64, torch.uint8, torch.bool]),
    seed=st.integers(0, 2**64),
)
@settings(max_examples=300, deadline=None)
def test_any_shape_and_dtype_arrives(
    name: str, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    tensor = random(*shape).mul(3).to(dtype)
    found = through(get_codec(name), tensor, seed)
    if not dtype.is_floating_point or name == "fp32":
        assert torch.equal(found, tensor)
    elif tensor.numel():
        rows = tensor.reshape(shape[0] if shape else 1, -1)
        error = (found.double() - tensor.double()).abs().view(rows.shape)
        step = 0 if name == "bf16" else steps_of(rows, int(name[3:]))
        assert bool((error <= step + rows.double().abs() / 256).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp32_is_exact_and_copies_nothing(dtype: torch.dtype) -> None:
    codec = get_codec("fp32")
    tensor = random(5, 3, dtype=dtype)
    tensor[1, 1], tensor[2, 0] = math.nan, -math.inf
    assert codec.encode(tensor, 0).data_ptr() == tensor.data_ptr()
    out = torch.empty_like(tensor)
    assert codec.landing_for(out).data_ptr() == out.data_ptr()
    assert torch.equal(through(codec, tensor).nan_to_num(9), tensor.nan_to_num(9))


@pytest.mark.parametrize("name", NAMES)
def test_tensors_with_gaps_and_gradients_are_taken(name: str) -> None:
    codec = get_codec(name)
    plain = random(6, 40)
    gaps = plain.t().contiguous().t().requires_grad_()
    payload = codec.encode(gaps, 3)
    assert not payload.requires_grad and torch.equal(payload, codec.encode(plain, 3))
    out, gaps_out = torch.empty(6, 40), torch.empty(40, 6).t()
    codec.decode(payload, out)
    codec.decode(codec.landing_for(gaps_out).copy_(payload), gaps_out)
    assert torch.equal(out, gaps_out)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_decides(name: str) -> None:
    """Neither the user's random numbers, which stay, nor the defaults of new tensors."""
    codec, state = get_codec(name), torch.get_rng_state()
    rows = random(300, 15)
    payload, found = codec.encode(rows, 2**20), through(codec, rows, 2**20)
    assert torch.equal(payload, get_codec(name).encode(rows, 2**20 + 2**32))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(payload, codec.encode(rows, 12)) == (name in ("fp32", "bf16"))
    torch.rand(3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        try:
            torch.set_default_dtype(dtype)
            torch.set_default_device("cpu" if dtype == torch.float32 else "meta")
            assert torch.equal(get_codec(name).encode(rows, 2**20), payload)
            out = torch.empty_like(rows)
            codec.decode(payload, out)
            assert torch.equal(out, found)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_sends_what_a_cpu_can_read(name: str) -> None:
    codec = get_codec(name)
    rows = random(1000, 35)
    rows[3, 4] = math.nan
    payload = codec.encode(rows.cuda(), 1)
    here, there = torch.empty_like(rows), torch.empty_like(rows, device="cuda")
    codec.decode(payload.cpu(), here)
    codec.decode(payload, there)
    torch.testing.assert_close(here, there.cpu(), equal_nan=True)
    good = torch.arange(1000) != 3
    assert bool((here - rows)[good].abs().max() <= steps_of(rows[good], 1).max())


def test_rows_and_gradients_have_a_codec_each() -> None:
    codecs = get_codecs(("int1", "int8"))
    assert [codecs.of(kind).name for kind in ("halo", "forward")] == ["int1"] * 2
    assert [codecs.of(kind).name for kind in ("halo_grad", "backward")] == ["int8"] * 2
    assert [one.name for one in get_codecs("bf16")] == ["bf16"] * 2


@pytest.mark.parametrize(
    ("option", "is_exact"),
    [
        ("fp32", True),
        (("fp32", "fp32"), True),
        (("bf16", "fp32"), False),
        (("fp32", "int1"), False),
    ],
)
def test_messages_are_exact_if_both_are(option: CodecOption, is_exact: bool) -> None:
    assert get_codecs(option).is_exact == is_exact


@pytest.mark.parametrize(
    "option", ["int3", ("int1",), ("int1", "int3"), ("int1",) * 3, None, (1, 2)]
)
def test_what_names_no_codecs_is_refused(option: object) -> None:
    with pytest.raises(ConfigError, match=r"codecs to be one of fp32, .*, or a pair of them"):
        get_codecs(option)  # type: ignore[arg-type]


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

"""Codecs: sizes known beforehand, exact where promised, right at any shape, dtype and place."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from lightning_gnnpipe.codecs import MessageOptions, get_codecs
from lightning_gnnpipe.codecs.codec import get_codec
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.types import CodecOption
from tests.helpers.codecs import FLOATS, NAMES, random, steps_of, through


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "expected"),
    [
        ("fp32", (10, 256), torch.float32, 10 * 1024),
        ("fp32", (10, 256), torch.float64, 10 * 2048),
        ("bf16", (10, 256), torch.float32, 10 * 512),
        ("bf16", (10, 256), torch.bfloat16, 10 * 512),
        ("int8", (10, 256), torch.float32, 10 * (4 + 256)),
        ("int8", (10, 256), torch.float64, 10 * (4 + 256)),
        ("int1", (10, 256), torch.bfloat16, 10 * (4 + 32)),
        ("int1", (10, 256), torch.float32, 10 * (4 + 32)),
        ("int1", (3, 5), torch.float32, 3 * 4 + 2),  # 15 bits, without gaps between rows
        ("int1", (3, 2, 3), torch.float32, 3 * 4 + 3),  # channels are all that is not a row
        ("int8", (10, 1), torch.float32, 10 * 4),  # as it is: coded, it would have 5 bytes a row
        ("int8", (10, 1), torch.float64, 10 * 5),
        ("int1", (10, 2), torch.bfloat16, 10 * 4),
        ("int1", (10, 256), torch.int64, 10 * 2048),
        ("int1", (10, 256), torch.bool, 10 * 256),
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
        assert bool((error <= steps_of(rows, 1) + rows.double().abs() / 128).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp32_is_exact_and_copies_nothing(dtype: torch.dtype) -> None:
    codec = get_codec("fp32")
    tensor = random(5, 3, dtype=dtype)
    tensor[1, 1], tensor[2, 0] = math.nan, -math.inf
    assert codec.encode(tensor, 0).data_ptr() == tensor.data_ptr()
    out = torch.empty_like(tensor)
    assert codec.landing_for(out).data_ptr() == out.data_ptr()
    assert torch.equal(through(codec, tensor).nan_to_num(9), tensor.nan_to_num(9))


def test_16_bit_floats_are_rounded_to_the_nearest() -> None:
    codec, tensor = get_codec("bf16"), random(100, 64)
    error = (through(codec, tensor) - tensor).abs()
    assert bool((error <= 2.0**-8 * tensor.abs()).all())
    short = random(100, 64, dtype=torch.bfloat16)
    assert torch.equal(through(codec, short), short)
    assert through(codec, torch.tensor([[70000.0, 1.0]]))[0, 0].isfinite()


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
    assert MessageOptions(halo_codec=option).is_exact == is_exact
    assert MessageOptions(cut_codec=option).is_exact == is_exact
    assert not MessageOptions(option, is_async=True).is_exact


@pytest.mark.parametrize(
    "option", ["int3", ("int1",), ("int1", "int3"), ("int1",) * 3, None, (1, 2)]
)
def test_what_names_no_codecs_is_refused(option: object) -> None:
    with pytest.raises(ConfigError, match=r"codecs to be one of fp32, .*, or a pair of them"):
        get_codecs(option)  # type: ignore[arg-type]

"""Tensors sent through a codec, and by how much they may differ."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnnpipe.codecs import Codec

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

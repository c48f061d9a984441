"""Codecs by name: full precision, bfloat16, 8 bits or 1 bit per value."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import get_args

import torch
from torch import Tensor

from lightning_gnnpipe.codecs.low_bit import LowBitCodec
from lightning_gnnpipe.codecs.payload import Codec, Codecs
from lightning_gnnpipe.errors import ConfigError, advice_on
from lightning_gnnpipe.types import CodecName, CodecOption


class CastCodec(Codec):
    """Sends bfloat16, rounded to nearest: the range of float32, 8 significant bits."""

    def _coded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return prod(shape) * torch.bfloat16.itemsize

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        return tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(torch.bfloat16).view(out.shape))


_CODECS: dict[str, Codec] = {
    "fp32": Codec(),
    "bf16": CastCodec("bf16"),
    "int8": LowBitCodec(8),
    "int1": LowBitCodec(1),
}


def get_codec(name: CodecName) -> Codec:
    """Return the codec called `name`.

    "fp32" sends each tensor in its own dtype. "int8" and "int1" send 8 bits or 1 bit per value plus
    32 bits per row, and round at random between the row's minimum and maximum.
    """
    return _CODECS[name]


def get_codecs(option: CodecOption, what: str = "codecs") -> Codecs:
    """Return the codecs of rows and gradients; a ConfigError calls the option `what`."""
    names = (option, option) if isinstance(option, str) else option
    is_pair = isinstance(names, tuple | list) and len(names) == 2
    if not is_pair or any(name not in get_args(CodecName) for name in names):
        raise ConfigError(
            expected=f"{what} to be one of {', '.join(_CODECS)}, or a pair of them",
            found=repr(option),
            remedy=advice_on(option) or "A pair holds the codec of rows and that of gradients.",
        )
    return Codecs(*map(get_codec, names))

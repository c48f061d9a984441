"""The codecs by name: full precision, bfloat16, 8 bits or 1 a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnnpipe.codecs.low_bit import LowBitCodec
from lightning_gnnpipe.codecs.payload import Codec
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.removed import advice_on
from lightning_gnnpipe.types import CodecName, CodecOption, TrafficKind, names_codecs


class CastCodec(Codec):
    """Sends bfloat16, rounded to the nearest: the range of float32, and 8 significant bits."""

    def _coded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return prod(shape) * torch.bfloat16.itemsize

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        return tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8)

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload.view(torch.bfloat16).view(out.shape))


EXACT: CodecName = "fp32"
_CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": lambda: Codec("fp32"),
    "bf16": lambda: CastCodec("bf16"),
    "int8": lambda: LowBitCodec(8),
    "int1": lambda: LowBitCodec(1),
}


def get_codec(name: CodecName) -> Codec:
    """Return the codec called `name`.

    Args:
        name: "fp32": each tensor in its own dtype. "bf16": 16-bit floats. "int8", "int1": so many
            bits a value, and 32 a row, rounded between the row's least and largest value.
    """
    return _CODECS[name]()


class Codecs(NamedTuple):
    """What rows are sent with, and their gradients."""

    rows: Codec
    grads: Codec

    def of(self, kind: TrafficKind) -> Codec:
        """Return what messages of a kind are sent with."""
        return self.grads if kind in ("backward", "halo_grad") else self.rows

    @property
    def is_exact(self) -> bool:
        """Whether what arrives is what was sent."""
        return self.rows.name == self.grads.name == EXACT


def get_codecs(option: CodecOption) -> Codecs:
    """Return the codecs called so: one name for both, or a name for each.

    Raises:
        ConfigError: There is no such codec.
    """
    return Codecs(*map(get_codec, codec_names(option)))


def codec_names(option: CodecOption, what: str = "codecs") -> tuple[CodecName, CodecName]:
    """Return the names of the codecs of rows, and of their gradients.

    Args:
        option: One name for both, or a name for each.
        what: What an error calls it.

    Raises:
        ConfigError: `option` is neither a codec's name nor two.
    """
    if not names_codecs(option):
        raise ConfigError(
            explain(
                expected=f"{what} to be one of {', '.join(_CODECS)}, or two of them",
                found=repr(option),
                remedy=advice_on(option)
                or "Name one for rows and their gradients, or one for each.",
            )
        )
    rows, grads = (option, option) if isinstance(option, str) else option
    return rows, grads


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """Of pipelined steps; exact ones send everything as it is, and wait for it.

    Attributes:
        halo_codec: Of rows, and their gradients, between shards of the graph; see `get_codecs`.
        cut_codec: Of activations, and their gradients, between stages.
        is_async: Shards use the rows and gradients that others had a step ago, while those of this
            step travel.
    """

    halo_codec: CodecOption = "fp32"
    cut_codec: CodecOption = "fp32"
    is_async: bool = False

    def check(self) -> None:
        """Check what is an option of the strategy.

        Raises:
            ConfigError: There is no such codec.
        """
        codec_names(self.halo_codec, "'halo_codec'")
        codec_names(self.cut_codec, "'cut_codec'")

    @property
    def is_exact(self) -> bool:
        """Whether what arrives is what was sent, in the same step."""
        names = {*codec_names(self.halo_codec), *codec_names(self.cut_codec)}
        return not self.is_async and names == {EXACT}

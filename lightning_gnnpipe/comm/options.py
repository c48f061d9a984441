"""How rows and their gradients travel between ranks in steps that need not be exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lightning_gnnpipe.comm.codec import get_codecs
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.types import CodecName, CodecOption


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """Of pipelined steps; exact ones send everything as it is, and wait for it.

    Attributes:
        halo_codec: Of rows, and their gradients, between shards of the graph; see `get_codecs`.
        cut_codec: Of activations, and their gradients, between stages.
        is_async: Shards use the rows and gradients that others had a step ago, while those of this
            step travel.
        momentum: Share of the old in asynchronous rows and gradients: `m old + (1 - m) new`.
    """

    halo_codec: CodecOption = "fp32"
    cut_codec: CodecOption = "fp32"
    is_async: bool = False
    momentum: float = 0.0

    def check(self) -> None:
        """Check what is an option of the strategy.

        Raises:
            ConfigError: There is no such codec, or no such share.
        """
        for name in ("halo_codec", "cut_codec"):
            value = getattr(self, name)
            names = value if isinstance(value, (tuple, list)) and len(value) == 2 else [value]
            if any(one not in get_args(CodecName) for one in names):
                _refuse(
                    f"'{name}' to be one of {', '.join(get_args(CodecName))}, or two of them",
                    repr(value),
                    "Name one for rows and their gradients, or one for each.",
                )
        if not 0 <= self.momentum < 1:
            _refuse(
                "'halo_momentum' to be from 0 to below 1",
                self.momentum,
                "0 uses what arrived last as it is; PipeGCN's is 0.95.",
            )

    @property
    def is_exact(self) -> bool:
        """Whether what arrives is what was sent, in the same step."""
        codecs = get_codecs(self.halo_codec), get_codecs(self.cut_codec)
        return not self.is_async and all(one.is_exact for one in codecs)


def _refuse(expected: str, found: object, remedy: str) -> None:
    raise ConfigError(explain(expected=expected, found=str(found), remedy=remedy))

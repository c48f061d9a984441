"""How rows and their gradients travel between ranks in steps that need not be exact."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gnnpipe.comm.codec import EXACT, codec_names
from lightning_gnnpipe.types import CodecOption


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

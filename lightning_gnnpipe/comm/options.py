"""How rows and their gradients travel between ranks in steps that need not be exact."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """Of pipelined steps; exact ones send everything as it is, and wait for it.

    Attributes:
        halo_codec: Of rows, and their gradients, between shards of the graph; see `get_codec`.
        cut_codec: Of activations, and their gradients, between stages.
        is_async: Shards use the rows and gradients that others had a step ago, while those of this
            step travel.
        momentum: Share of the old in asynchronous rows and gradients: `m old + (1 - m) new`.
    """

    halo_codec: str = "fp32"
    cut_codec: str = "fp32"
    is_async: bool = False
    momentum: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether what arrives is what was sent, in the same step."""
        return not self.is_async and {self.halo_codec, self.cut_codec} == {"fp32"}

"""How layers are to be dealt out to stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_gnnpipe.types import RepeatOption

Balance = Literal["measured", "uniform"] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Splitting:
    """How layers are dealt out to stages.

    Attributes:
        balance: By measured costs, alike, or how many each stage gets.
        repeat_encoder: Whether stages compute again what they can, rather than to receive it.
        num_virtual: Stages of each rank, if there are several ranks along the pipe axis.
    """

    balance: Balance
    repeat_encoder: RepeatOption
    num_virtual: int

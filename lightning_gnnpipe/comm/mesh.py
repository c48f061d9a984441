"""The device mesh: today its pipe axis, along which each rank is one stage."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch


@dataclass(frozen=True, slots=True)
class PipeAxis:
    """This rank's place on the pipe axis.

    Attributes:
        stage: This rank's stage, from 0.
        num_stages: Stages, S; the world size.
        device: Where tensors live.
        timeout: Longest wait for another rank.
        wire: Where tensors must be to be sent; None for `device`.
    """

    stage: int
    num_stages: int
    device: torch.device
    timeout: timedelta
    wire: torch.device | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.stage == self.num_stages - 1

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks to talk to."""
        return self.num_stages > 1

    @property
    def wire_device(self) -> torch.device:
        """Where tensors must be to be sent."""
        return self.device if self.wire is None else self.wire

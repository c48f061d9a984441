"""What a message costs: so many seconds whatever its size, and so many bytes a second on top.

    seconds = message_s + num_bytes / bytes_per_s

A rank that waits is woken late where all cores compute, which most of `message_s` then is.

Source: Hockney, The communication challenge for MPP (1994).
"""

from __future__ import annotations

from dataclasses import dataclass

MESSAGE_S = 1.4e-3
"""Seconds of a message between two processes of one machine, by gloo, both of its cores computing;
the median in `examples/benchmarks/prediction`."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a rank to the others.

    Attributes:
        bytes_per_s: Its speed, each way.
        message_s: Seconds of a message, whatever its size.
    """

    bytes_per_s: float
    message_s: float = MESSAGE_S

    @staticmethod
    def of(gbit_per_s: float, message_s: float = MESSAGE_S) -> Link:
        """Return a link of a known speed in Gbit/s, each way."""
        return Link(gbit_per_s * 1e9 / 8, message_s)

    @property
    def gbit_per_s(self) -> float:
        """Its speed in Gbit/s, each way."""
        return self.bytes_per_s * 8 / 1e9

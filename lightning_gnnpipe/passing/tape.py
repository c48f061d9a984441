"""What a chunk read of others, noted so that its activations can be computed again in backward.

By then the histories hold newer rows. The store keeps what is needed: the sums of linear layers,
and for the others the rows that were overwritten. Rows that were pushed are not pushed again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable


class Tape:
    """The reads of one run of some layers over one chunk: recorded once, then played back.

    Attributes:
        is_replay: Whether the layers run for the second time.
        stale: For each read of halo rows the chunks whose rows were stale.
    """

    def __init__(self) -> None:
        self.is_replay = False
        self.stale: dict[Hashable, Collection[int]] = {}

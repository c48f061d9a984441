"""What a chunk read of others, kept so that its activations can be computed again in backward.

By then the histories hold newer rows. The sums of linear layers are kept, and the halo rows of the
others; rows that were pushed are not pushed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor


class Tape:
    """The reads of one run of some layers over one chunk: recorded once, then played back."""

    def __init__(self) -> None:
        self.is_replay = False
        self._saved: dict[Hashable, Tensor] = {}

    def read(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return what `compute` gives, or gave when it was recorded."""
        if self.is_replay:
            return self._saved.pop(key)
        result = compute()
        self._saved[key] = result.clone()  # what comes next may overwrite it
        return result

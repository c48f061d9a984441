"""Where the autograd graph of a layer is cut, so that backward can go layer by layer.

    rows  |  leaf -> own and halo rows -> messages -> outputs      one chunk, forward
    rows  <- what all chunks have for them | leaf.grad <- outputs  backward, in two parts

Chunk by chunk, the gradient that a chunk has for rows that it read stale comes too late: they have
gone back before. With a cut nothing goes back beyond `rows` until all chunks have gone back to
their leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from lightning_gnnpipe.passing.interfaces import CallKey


@dataclass(slots=True)
class Cut:
    """The rows of one call in one chunk.

    Attributes:
        rows: `[num_nodes_of_chunk, *]` as the layer has computed them.
        leaf: The same, where the layer goes on.
        end: Called when the chunk has gone back to its leaf.
        collect: Returns what readers have for the rows, None if nothing; called when all chunks
            have ended.
    """

    rows: Tensor
    leaf: Tensor
    end: Callable[[], None]
    collect: Callable[[], Tensor | None]

    def gradient(self) -> Tensor | None:
        """Return that of `rows`, of all their readers; None if there is none."""
        own, others = self.leaf.grad, self.collect()
        if own is None or others is None:
            return own if others is None else others.to(self.rows.dtype)
        return own + others.to(own.dtype)


@dataclass(slots=True)
class Cuts:
    """The cuts of what is running.

    Attributes:
        found: Of the present layer and chunk, in the order in which they were made; None where
            nothing is cut.
    """

    found: dict[CallKey, Cut] | None = None

    @contextmanager
    def into(self, found: dict[CallKey, Cut]) -> Iterator[None]:
        """Cut within the block, and note where in `found`."""
        before, self.found = self.found, found
        try:
            yield
        finally:
            self.found = before

    def make(
        self,
        key: CallKey,
        rows: Tensor,
        collect: Callable[[], Tensor | None],
        end: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Return the leaf in the place of `rows`."""
        assert self.found is not None
        leaf = rows.detach().requires_grad_()
        self.found[key] = Cut(rows, leaf, end, collect)
        return leaf

    def has(self, rows: Tensor) -> bool:
        """Whether `rows` are to be cut off."""
        return self.found is not None and rows.requires_grad

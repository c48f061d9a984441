"""Where the autograd graph of a layer is cut, so that backward can go layer by layer.

    rows  |  leaf -> own and halo rows -> messages -> outputs      one chunk, forward
    rows  <- what all chunks have for them | leaf.grad <- outputs  backward, in two parts

Chunk by chunk, the gradient that a chunk has for rows that it read stale comes too late: they have
gone back before. With a cut nothing goes back beyond `rows` until all chunks have gone back to
their leaves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from lightning_gnnpipe.passing.interfaces import CallKey


class Cut(ABC):
    """The rows of one call in one chunk.

    Args:
        rows: `[num_nodes_of_chunk, *]` as the layer has computed them.

    Attributes:
        rows: The same.
        leaf: The same, where the layer goes on.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.leaf = rows.detach().requires_grad_()
        self._own: Tensor | None = None

    def gather(self) -> None:
        """Take what has come to the leaf; it may share memory with what came elsewhere."""
        grad, self.leaf.grad = self.leaf.grad, None
        if grad is not None:
            self._own = grad if self._own is None else self._own + grad

    def end(self) -> None:  # noqa: B027
        """Take note that the chunk has gone back to its leaf."""

    @abstractmethod
    def collect(self) -> Tensor | None:
        """Return what readers have for the rows, None if nothing; once all chunks have ended."""

    def gradient(self) -> Tensor | None:
        """Return that of `rows`, of all their readers; None if there is none."""
        own, others = self._own, self.collect()
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

    def add(self, key: CallKey, cut: Cut) -> Tensor:
        """Note a cut, and return its leaf."""
        assert self.found is not None
        self.found[key] = cut
        return cut.leaf

    def has(self, rows: Tensor) -> bool:
        """Whether `rows` are to be cut off."""
        return self.found is not None and rows.requires_grad

"""What the chunks of one layer exchange in an exact pass: all write before any reads."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lightning_gnnpipe.graph import Chunk, ChunkPlan
from lightning_gnnpipe.staleness.copies import HostCopies
from lightning_gnnpipe.staleness.moments import float_of, mean_and_var, row_sums
from lightning_gnnpipe.staleness.store import NEVER, GradientBuffer, HistoryStore


class NotYet(BaseException):
    """A chunk needs what other chunks have not written: it stops, and runs again after them.

    No Exception, which layers may catch.
    """


class ExactStore(HistoryStore):
    """Rows, statistics and gradients of one layer, each written once by each chunk.

    A chunk that runs again writes nothing a second time. `num_written` counts what chunks wrote.
    `histories`: get the rows as well, for later steps. `copies`: make the tables.
    """

    def __init__(
        self, plan: ChunkPlan, histories: HistoryStore | None, copies: HostCopies | None = None
    ) -> None:
        super().__init__(plan.num_rows, plan.num_chunks)
        self.copies = copies or self.copies
        self._histories, self._all = histories, plan.whole.chunks[0]
        self.linear_scale = self.message_scale = 1.0
        self.num_written = 0
        self._parts: dict[Hashable, dict[int, Tensor]] = {}  # by chunk
        # Of all rows: sums by chunk (None if the rows are messages), their sum, the center.
        self._whole: dict[Hashable, tuple[Tensor | None, Tensor, Tensor]] = {}
        self._counted: set[Hashable] = set()

    def push(self, key: Hashable, chunk: Chunk, rows: Tensor, *, keeps_old: bool = False) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.written[chunk.index] == NEVER:
            super().push(key, chunk, rows)
            self.num_written += 1

    def read(self, key: Hashable, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        written = self._entries[key].written
        if any(written[one] == NEVER for one in chunk.halo_chunks):
            raise NotYet
        return super().read(key, chunk)

    def push_grad(self, key: Hashable, chunk: Chunk, grad: Tensor) -> None:
        if chunk.index not in self._parts.get(("grad", key), ()):
            super().push_grad(key, chunk, grad)

    def add_grad(self, key: Hashable, chunk: Chunk, own: Tensor, *, is_linear: bool) -> Tensor:
        self._gather(("grad", key), chunk, own.new_empty(0))
        return super().add_grad(key, chunk, own, is_linear=is_linear)

    def add_output(
        self, key: Hashable, chunk: Chunk, grad: Tensor
    ) -> tuple[GradientBuffer, Tensor]:
        found = super().add_output(key, chunk, grad)
        self._gather(("grad", key), chunk, grad.new_empty(0))
        return found

    def sum_grads(self, key: Hashable, chunk: Chunk, grad: Tensor) -> Tensor:
        """Return the sum of the gradients that all chunks give."""
        return torch.stack([*self._gather(("statistics", key), chunk, grad).values()]).sum(0)

    def statistics(
        self, key: Hashable, chunk: Chunk, rows: Tensor, *, are_messages: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and number of the rows of all chunks."""
        rows = rows.detach().to(float_of(rows.dtype))
        center = rows.sum(0) / max(rows.size(0), 1)
        own = torch.cat([row_sums(rows, center), center.double().unsqueeze(0)])
        parts = self._gather(key, chunk, own)
        if key not in self._whole:
            count, first, second, centers = torch.stack([*parts.values()]).unbind(1)
            middle = (count * centers).sum(0) / count.sum(0).clamp(min=1)
            away = centers - middle
            second = second + away * (2 * first + count * away)
            sums = torch.stack([count, first + count * away, second], 1)
            sums = sums[torch.argsort(torch.tensor([*parts], device=sums.device))]
            self._whole[key] = None if are_messages else sums, sums.sum(0), middle.to(rows.dtype)
        _, total, middle = self._whole[key]
        return *mean_and_var(total, middle), total[0]

    def is_first(self, key: Hashable) -> bool:
        """Whether this is the first call with the statistics `key`."""
        is_first = key not in self._counted
        self._counted.add(key)
        return is_first

    def end_layer(self, *, keeps_rows: bool) -> None:
        """Free all; if it `keeps_rows`, rows and statistics go to the histories before."""
        histories = self._histories if keeps_rows else None
        if histories is not None:
            for key, entry in self._entries.items():
                histories.push(key, self._all, entry.rows)
            for key, (sums, total, middle) in self._whole.items():
                histories.moments.put(key, sums, total, middle)
        for entry in self._entries.values():
            self.copies.give_back([entry.rows, entry.grads.total])
        for one in (self._entries, self._parts, self._whole):
            one.clear()
        self._counted.clear()

    def _gather(self, key: Hashable, chunk: Chunk, own: Tensor) -> dict[int, Tensor]:
        """Keep what a chunk gives; return it of all chunks once each has given it."""
        parts = self._parts.setdefault(key, {})
        if chunk.index not in parts:
            parts[chunk.index] = own
            self.num_written += 1
        if len(parts) < self.num_chunks:
            raise NotYet
        return parts

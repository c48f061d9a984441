"""Planned graphs and their histories.

Histories belong to one input of the pipelined module: a graph, its features, and all other
arguments. A step reads only rows that a step on the same input has written.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum, auto

from lightning_gnnpipe.chunks import PlannedInputs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.graph import ChunkPlan
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.staleness import HistoryOptions, HistoryStore


class PlannedGraph:
    """One graph, or this rank's shard of it.

    `cut_frac`: share of edges between chunks, 0 if dropped. `reading` serves passes that write no
    histories.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        transport: Transport,
        *,
        is_complete: bool = True,
        cut_frac: float = 0.0,
    ) -> None:
        self.plan, self.is_complete, self.cut_frac = plan, is_complete, cut_frac
        self.inputs = PlannedInputs(plan)
        store = None if plan.shard is None else SharedStore(plan, transport, keeps_rows=False)
        self.reading = MessageContext(store, plan)


class RowState(Enum):
    """What the next step finds in the histories of an input."""

    WRITTEN = auto()  # rows of the last step on the input
    RENEWED = auto()  # rows that an exact pass has computed with the present weights
    REFRESH_DUE = auto()  # an exact pass must recompute all rows before the next step


class Histories:
    """Histories of one input; empty until an exact step writes them.

    Attributes:
        inputs: Of the next pass; the inputs of the graph, or own ones for a later call in the step.
        filled: `Mode.reads` of the exact steps that have filled them.
        frozen: Per weight: whether it needed no gradient in the last step.
        state: See `RowState`.
        was_renewed: Whether the last validation renewed the rows; None before the first.
    """

    def __init__(
        self,
        graph: PlannedGraph,
        options: HistoryOptions,
        transport: Transport,
        *,
        is_kept: bool = True,
        is_first: bool = True,
    ) -> None:
        self.graph, self._transport, self.is_kept = graph, transport, is_kept
        self.inputs = graph.inputs if is_first else PlannedInputs(graph.plan)
        self.filled: set[Hashable] = set()
        self.frozen: tuple[bool, ...] = ()
        self.last_step = -1
        self.state = RowState.WRITTEN
        self.was_renewed: bool | None = None
        self._make(options)

    def ask_refresh(self) -> None:
        """Have all rows recomputed before the next step, unless they are new."""
        if self.state is not RowState.RENEWED:
            self.state = RowState.REFRESH_DUE

    def takes_rows(self, step: int, *, is_asked: bool = False) -> bool:
        """Whether rows of validation may replace all rows before training pass `step`."""
        takes = self.store.options.method.takes_validation or is_asked
        return takes and step > 0 and self.state is not RowState.RENEWED

    def renew(self) -> None:
        """Record that an exact pass without dropout has written all rows."""
        self.store.on_renewed()
        self.state = RowState.RENEWED

    def drain(self) -> None:
        """Wait for messages between shards, and discard them."""
        if isinstance(self.store, SharedStore):
            self.store.drain()

    def drop(self) -> None:
        """Free the rows; the next training step on this input is exact."""
        self.state = RowState.WRITTEN
        self.drain()
        self._make(self.store.options)
        self.filled.clear()

    def _make(self, options: HistoryOptions) -> None:
        graph, plan = self.graph, self.graph.plan
        is_moved = options.method.follows_drift and not plan.is_disjoint
        ends = [chunk.end for chunk in plan.chunks] if is_moved else None
        self.store: HistoryStore
        if plan.shard is None:
            self.store = HistoryStore(plan.num_rows, plan.num_chunks, options, ends, graph.cut_frac)
        else:
            self.store = SharedStore(plan, self._transport, options, ends, graph.cut_frac)
        self.writing = MessageContext(self.store, plan, graph.reading.functions)

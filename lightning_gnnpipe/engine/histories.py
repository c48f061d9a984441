"""Planned graphs and their histories.

Histories belong to one input of the pipelined module: a graph, its features, and all other
arguments. A step reads only rows that a step on the same input has written.
"""

from __future__ import annotations

from collections.abc import Hashable

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


class Histories:
    """Histories of one input; empty until an exact step writes them.

    Attributes:
        inputs: Of the next pass; the inputs of the graph, or own ones for a later call in the step.
        filled: `Mode.reads` of the exact steps that have filled them.
        frozen: Per weight: whether it needed no gradient in the last step.
        is_renewed: Whether an exact pass has computed all embeddings since the last step.
        is_refresh_due: Whether one must before the next step.
    """

    def __init__(
        self,
        graph: PlannedGraph,
        options: HistoryOptions,
        transport: Transport,
        *,
        is_first: bool = True,
    ) -> None:
        self.graph, self._transport = graph, transport
        self.inputs = graph.inputs if is_first else PlannedInputs(graph.plan)
        self.filled: set[Hashable] = set()
        self.frozen: tuple[bool, ...] = ()
        self.last_step = -1
        self.is_renewed = self.is_refresh_due = False
        self._make(options)

    def ask_refresh(self) -> None:
        """Have all rows recomputed before the next step, unless they are new."""
        self.is_refresh_due = not self.is_renewed

    def renew(self) -> None:
        """Record that an exact pass without dropout has written all rows."""
        self.store.on_renewed()
        self.is_renewed, self.is_refresh_due = True, False

    def end_step(self, number: int, frozen: tuple[bool, ...]) -> None:
        """Record that training pass `number` has written all rows."""
        self.last_step, self.frozen = number, frozen
        self.is_renewed = self.is_refresh_due = False

    def drain(self) -> None:
        """Wait for messages between shards, and discard them."""
        if isinstance(self.store, SharedStore):
            self.store.drain()

    def drop(self, *, waits: bool) -> None:
        """Free the rows; the next training step on this input is exact."""
        self.is_renewed = self.is_refresh_due = False
        if waits:
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
        self.writing = MessageContext(self.store, plan, graph.reading.edges)

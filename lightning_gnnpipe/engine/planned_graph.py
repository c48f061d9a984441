"""A graph as the engine keeps it: its plan, and the batch in plan order."""

from __future__ import annotations

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.graph import ChunkPlan
from lightning_gnnpipe.passing import MessageContext


class PlannedGraph:
    """One graph, or this rank's shard of it.

    Args:
        plan: The chunks.
        transport: The ranks.
        is_complete: Whether the plan has all edges of the graph.
        cut_frac: The share of its edges that lie between chunks; 0 if these are dropped.

    Attributes:
        inputs: The batch's tensors in plan order.
        reading: Serves passes that write no histories.
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
        store = None if plan.shard is None else SharedStore(plan, transport, None)
        self.reading = MessageContext(store, plan)

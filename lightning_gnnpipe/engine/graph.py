"""A graph as the engine keeps it: its plan, the histories over it, the batch in plan order."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.partitioner import ChunkOptions, Partitioner
from lightning_gnnpipe.engine.renewal import TrainedCall
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.fallbacks import Fallbacks
from lightning_gnnpipe.graph import (
    ChunkPlan,
    build_chunk_plan,
    check_graph,
    edge_cut_frac,
    graph_fingerprint,
    plan_from_assignment,
    shard_plan,
)
from lightning_gnnpipe.history import HistoryOptions, HistoryStore
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.stages import Inputs

log = logging.getLogger(__name__)

_NUM_KEPT = 4


class PlannedGraph:
    """One graph, or this rank's shard of it: plan and batch; histories once it is trained on.

    Args:
        plan: The chunks.
        histories: How histories are kept.
        transport: The ranks.
        fingerprint: Of the graph, as far as the plan has its edges.
        is_complete: Whether it has all of them.
        cut_frac: The share of its edges that lie between chunks; 0 if these are dropped.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        histories: HistoryOptions,
        transport: Transport,
        fingerprint: int,
        *,
        is_complete: bool,
        cut_frac: float = 0.0,
    ) -> None:
        self.cut_frac = cut_frac
        self.plan, self.fingerprint, self.is_complete = plan, fingerprint, is_complete
        self.inputs = PlannedInputs(plan)
        self._transport = transport
        self.reading = MessageContext(self._shared(None), plan)
        self.filled: set[Hashable] = set()
        self.is_renewed = False  # rows are of the present weights
        self.owes_renewal = False  # by validation that a run that goes on does not repeat
        self.was_renewed: bool | None = None  # by the last validation
        self.trained_with: TrainedCall | None = None
        self._make_histories(histories)

    def is_refresh_due(self, step: int, is_asked: bool) -> bool:
        """Whether a pass is to be made that recomputes all rows before training pass `step`.

        Args:
            step: Its number.
            is_asked: Whether a callback wants it.
        """
        is_asked = is_asked and not self.is_renewed
        return is_asked or (self.owes_renewal and self.takes_rows(step))

    def takes_rows(self, step: int, *, is_asked: bool = False) -> bool:
        """Whether the rows of validation are to take the place of all before `step`."""
        takes = self.store.options.method.takes_validation or is_asked
        return takes and step > 0 and not self.is_renewed

    def note_step(self) -> None:
        """Take note that a training step has read the rows."""
        self.is_renewed = self.owes_renewal = False

    def renew(self) -> None:
        """Take note that an exact pass without dropout has just written all rows."""
        self.store.on_renewed()
        self.is_renewed = True

    def drop_histories(self) -> None:
        """Free the histories; the next training step on this graph is exact."""
        self.note_step()
        self.trained_with = None
        if isinstance(self.writing.store, SharedStore):
            self.writing.store.drain()
        self._make_histories(self.store.options)
        self.filled.clear()

    def _make_histories(self, options: HistoryOptions) -> None:
        plan = self.plan
        is_moved = options.method.follows_drift and not plan.is_disjoint
        ends = [chunk.end for chunk in plan.chunks] if is_moved else None
        self.store = HistoryStore(plan.num_rows, plan.num_chunks, options, ends, self.cut_frac)
        store = self._shared(self.store) or self.store
        self.writing = MessageContext(store, plan, self.reading.functions)

    def _shared(self, histories: HistoryStore | None) -> SharedStore | None:
        """Return the store through which shards see each other, if there are several."""
        if self.plan.shard is None:
            return None
        return SharedStore(self.plan, self._transport, histories)


class GraphCache:
    """The graphs of the last calls, by content, and the histories of the one trained on last."""

    def __init__(
        self, options: ChunkOptions, histories: HistoryOptions, transport: Transport
    ) -> None:
        self.histories = histories.seen_from(transport.world.device)
        self._partitioner = Partitioner(options)
        self._transport = transport
        self._graphs: OrderedDict[tuple[int, bool], PlannedGraph] = OrderedDict()
        self._trained: PlannedGraph | None = None
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)

    @property
    def trained(self) -> PlannedGraph | None:
        """The graph of the last training step, which has the histories."""
        return self._trained

    def drop_histories(self) -> None:
        """Forget histories, of weights that are no more; the next training step is exact."""
        if self._trained is not None:
            self._trained.drop_histories()

    def for_training(self, fingerprint: int, inputs: Inputs) -> PlannedGraph:
        """Return the graph cut into chunks; a change of graph drops the last one's histories."""
        graph = self._get((fingerprint, True), lambda: self._cut(fingerprint, inputs))
        if self.histories.is_too_narrow:
            self._fallbacks.tell(
                f"history_dtype {self.histories.dtype} has no room for small gradients",
                origin="gradients that linear layers exchange in this dtype",
                to="gradients as computed",
            )
        if graph.is_complete:
            self._graphs.pop((fingerprint, False), None)
        if self._trained is not graph:
            if self._trained is not None:
                self._trained.drop_histories()
                self._warn_of_change()
            self._trained = graph
        return graph

    def for_inference(self, fingerprint: int, inputs: Inputs) -> PlannedGraph:
        """Return the graph for exact passes: as cut for training, or else without a partition.

        It has all edges, whether training has them or not.
        """
        cut = self._graphs.get((fingerprint, True))
        if cut is not None and cut.is_complete:
            return cut
        return self._get((fingerprint, False), lambda: self._uncut(fingerprint, inputs))

    def is_cut(self, inputs: Inputs) -> bool:
        """Whether the graph is, or may be, trained on in more than one chunk, or shard."""
        return self._partitioner.num_chunks(inputs) * self._transport.mesh.num_shards > 1

    def plan_to_measure(self, graph: PlannedGraph, inputs: Inputs) -> ChunkPlan:
        """Return a plan with chunks of the size of training, even if METIS has not run."""
        num_chunks = self._partitioner.num_chunks(inputs)
        if graph.plan.num_chunks == num_chunks and graph.plan.shard is None:
            return graph.plan
        edge_index = inputs.edge_index.cpu()
        plan = build_chunk_plan(
            edge_index, inputs.num_nodes, num_chunks=num_chunks, partition="contiguous"
        )
        return plan.with_edge_sets(inputs.edge_sizes).to(self._transport.world.device)

    def _warn_of_change(self) -> None:
        self._fallbacks.tell(
            "The graph changed between training steps",
            origin="pipelined steps",
            to="an exact step for each change, since histories belong to one graph",
        )

    def _get(self, key: tuple[int, bool], make: Callable[[], PlannedGraph]) -> PlannedGraph:
        if key not in self._graphs:
            with torch.inference_mode(False), torch.no_grad():
                made = self._graphs[key] = make()
            if len(self._graphs) > _NUM_KEPT:
                idle = (k for k, g in self._graphs.items() if g not in (self._trained, made))
                del self._graphs[next(idle)]
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _uncut(self, fingerprint: int, inputs: Inputs) -> PlannedGraph:
        edge_index = inputs.edge_index.cpu()
        check_graph(edge_index, inputs.num_nodes)
        assignment = torch.zeros(inputs.num_nodes, dtype=torch.int64)
        return self._planned(inputs, edge_index, assignment, fingerprint)

    def _cut(self, fingerprint: int, inputs: Inputs) -> PlannedGraph:
        edge_index, found = inputs.edge_index.cpu(), self._partitioner
        check_graph(edge_index, inputs.num_nodes)
        assignment = self._transport.run_on_first(lambda: found.chunks(inputs))
        kept = found.kept_edges(edge_index, assignment)
        if kept is not None:
            self._warn_of_loss(edge_index.size(1), kept.numel())
            several = inputs.edge_sizes if len(inputs.edge_sizes) > 1 else ()
            fingerprint = graph_fingerprint(edge_index[:, kept], inputs.num_nodes, several)
        return self._planned(inputs, edge_index, assignment, fingerprint, kept)

    def _warn_of_loss(self, num_edges: int, num_kept: int) -> None:
        lost = num_edges - num_kept
        self._fallbacks.tell(
            f"cross_chunk_edges='drop' leaves out {lost:,} of {num_edges:,} edges "
            f"({100 * lost / num_edges:.1f} %), those between chunks",
            origin="the whole graph",
            to="one without them in training",
            remedy="Validation, test and predict read all.",
        )

    def _planned(
        self,
        inputs: Inputs,
        edge_index: Tensor,
        assignment: Tensor,
        fingerprint: int,
        kept: Tensor | None = None,
    ) -> PlannedGraph:
        """Return the plan of the graph, or of this rank's shard."""
        mesh = self._transport.mesh
        if mesh.num_shards == 1:
            plan = plan_from_assignment(edge_index, inputs.num_nodes, assignment, kept=kept)
        else:
            shards = self._transport.run_on_first(
                lambda: self._partitioner.shards(edge_index, assignment, mesh.num_shards)
            )
            plan = shard_plan(
                edge_index,
                assignment,
                shards,
                index=mesh.shard,
                num_shards=mesh.num_shards,
                kept=kept,
            )
        plan = plan.with_edge_sets(inputs.edge_sizes)
        return PlannedGraph(
            plan.to(self._transport.world.device),
            self.histories,
            self._transport,
            fingerprint,
            is_complete=kept is None,
            cut_frac=edge_cut_frac(edge_index, assignment) if kept is None else 0.0,
        )

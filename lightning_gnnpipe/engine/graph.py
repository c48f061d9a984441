"""The graphs of the last calls, and the histories of the inputs that training is given."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.histories import Histories
from lightning_gnnpipe.engine.identity import InputKey
from lightning_gnnpipe.engine.known_inputs import KnownInputs
from lightning_gnnpipe.engine.partitioner import ChunkOptions, Partitioner
from lightning_gnnpipe.engine.planned_graph import PlannedGraph
from lightning_gnnpipe.fallbacks import Fallbacks
from lightning_gnnpipe.graph import (
    ChunkPlan,
    build_chunk_plan,
    check_graph,
    edge_cut_frac,
    plan_from_assignment,
    shard_plan,
)
from lightning_gnnpipe.history import HistoryOptions
from lightning_gnnpipe.stages import Inputs

log = logging.getLogger(__name__)

_NUM_IDLE = 4


class GraphCache:
    """The graphs of the last calls, by content, and the histories over them.

    Args:
        options: How graphs are cut.
        histories: How histories are kept.
        transport: The ranks.

    Attributes:
        inputs: Which inputs have histories.
        trained: The histories of the last training step.
    """

    def __init__(
        self, options: ChunkOptions, histories: HistoryOptions, transport: Transport
    ) -> None:
        self.histories = histories.seen_from(transport.world.device)
        self.inputs = KnownInputs(is_quiet=not transport.world.is_root)
        self.trained: Histories | None = None
        self._drops_edges = options.cross_edges == "drop"
        self._partitioner = Partitioner(options)
        self._transport = transport
        self._graphs: OrderedDict[tuple[int, bool], PlannedGraph] = OrderedDict()
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest histories on this rank."""
        return max((one.store.num_bytes for one in self.inputs), default=0)

    def drop_histories(self) -> None:
        """Forget histories, of weights that are no more; the next training steps are exact."""
        self.inputs.drop_rows()

    def for_training(self, key: InputKey, inputs: Inputs, num_bytes: int) -> Histories:
        """Return the histories of what a training step is given; empty if none are kept.

        Args:
            key: Of what it is given.
            inputs: The graph.
            num_bytes: Bytes of the largest histories on any rank.
        """
        found = self.inputs.get(key.number)
        if found is None:
            is_kept = self.inputs.admits(key.number, num_bytes)
            is_cut = is_kept or self._drops_edges
            graph = (self.cut if is_cut else self.for_inference)(key.graph, inputs)
            found = Histories(graph, self.histories, self._transport, is_kept=is_kept)
            if is_kept:
                self.inputs.keep(key.number, found)
        if self.trained is not None and self.trained is not found:
            self.trained.drain()
        self.trained = found
        return found

    def cut(self, fingerprint: int, inputs: Inputs) -> PlannedGraph:
        """Return the graph cut into chunks."""
        graph = self._get((fingerprint, True), lambda: self._cut(inputs))
        if self.histories.is_too_narrow:
            self._fallbacks.tell(
                f"history_dtype {self.histories.dtype} has no room for small gradients",
                origin="gradients that linear layers exchange in this dtype",
                to="gradients as computed",
            )
        if graph.is_complete:
            self._graphs.pop((fingerprint, False), None)
        return graph

    def for_inference(self, fingerprint: int, inputs: Inputs) -> PlannedGraph:
        """Return the graph for exact passes: as cut for training, or else without a partition.

        It has all edges, whether training has them or not.
        """
        cut = self._graphs.get((fingerprint, True))
        if cut is not None and cut.is_complete:
            return cut
        return self._get((fingerprint, False), lambda: self._uncut(inputs))

    def is_cut(self, inputs: Inputs) -> bool:
        """Whether the graph is, or may be, trained on in more than one chunk, or shard."""
        return self._partitioner.num_chunks(inputs) * self._transport.mesh.num_shards > 1

    def plan_to_measure(self, fingerprint: int, inputs: Inputs) -> ChunkPlan:
        """Return a plan with chunks of the size of training, even if METIS has not run."""
        cut = self._graphs.get((fingerprint, True))
        if cut is not None and cut.plan.shard is None:
            return cut.plan
        num_chunks = self._partitioner.num_chunks(inputs)
        edge_index = inputs.edge_index.cpu()
        plan = build_chunk_plan(
            edge_index, inputs.num_nodes, num_chunks=num_chunks, partition="contiguous"
        )
        return plan.with_edge_sets(inputs.edge_sizes).to(self._transport.world.device)

    def _get(self, key: tuple[int, bool], make: Callable[[], PlannedGraph]) -> PlannedGraph:
        if key not in self._graphs:
            with torch.inference_mode(False), torch.no_grad():
                made = self._graphs[key] = make()
            used = [made, *(one.graph for one in self.inputs)]
            idle = [k for k, graph in self._graphs.items() if graph not in used]
            for one in idle[: max(0, len(idle) - _NUM_IDLE)]:
                del self._graphs[one]
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _uncut(self, inputs: Inputs) -> PlannedGraph:
        edge_index = inputs.edge_index.cpu()
        check_graph(edge_index, inputs.num_nodes)
        assignment = torch.zeros(inputs.num_nodes, dtype=torch.int64)
        return self._planned(inputs, edge_index, assignment)

    def _cut(self, inputs: Inputs) -> PlannedGraph:
        edge_index, found = inputs.edge_index.cpu(), self._partitioner
        check_graph(edge_index, inputs.num_nodes)
        assignment = self._transport.run_on_first(lambda: found.chunks(inputs))
        kept = found.kept_edges(edge_index, assignment)
        if kept is not None:
            self._warn_of_loss(edge_index.size(1), kept.numel())
        return self._planned(inputs, edge_index, assignment, kept)

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
            self._transport,
            is_complete=kept is None,
            cut_frac=edge_cut_frac(edge_index, assignment) if kept is None else 0.0,
        )

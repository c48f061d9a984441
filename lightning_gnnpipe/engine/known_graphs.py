"""Caches of graphs, and of histories by input.

The first input of training gets histories at once, any further input at its second step:

    step     1      2      3      4      5      6        inputs a, b, c in turn
    input    a      b      c      a      b      c
             exact  exact  exact  stale  exact  exact    b and c have histories from here on

An input that is new in every step runs exactly and takes no memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_gnnpipe.calls import Inputs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.histories import Histories, PlannedGraph
from lightning_gnnpipe.engine.identity import InputKey
from lightning_gnnpipe.engine.resume import SavedHistories, SavedRun
from lightning_gnnpipe.errors import Fallbacks
from lightning_gnnpipe.graph import (
    ChunkPlan,
    build_chunk_plan,
    check_graph,
    edge_cut_frac,
    plan_from_assignment,
    shard_plan,
)
from lightning_gnnpipe.staleness import HistoryOptions
from lightning_gnnpipe.steps import ChunkOptions, Partitioner

log = logging.getLogger(__name__)

_NUM_IDLE = 4


class GraphCache:
    """The last graphs by content, and their histories; `trained`: of the last training step."""

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
        """Drop all histories; the next training step on each input is exact."""
        self.inputs.drop_rows()

    def for_training(self, key: InputKey, inputs: Inputs, num_bytes: int) -> Histories:
        """Return the histories for the input of a training step; empty if none are kept."""
        found = self.inputs.get(key.number)
        if found is None:
            is_kept = self.inputs.admits(key, num_bytes)
            is_cut = is_kept or self._drops_edges
            graph = (self.cut if is_cut else self.for_inference)(key.graph, inputs)
            found = Histories(
                graph, self.histories, self._transport, is_kept=is_kept, is_first=key.call == 0
            )
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
        """Return the graph with all edges: the training plan if it has them."""
        cut = self._graphs.get((fingerprint, True))
        if cut is not None and cut.is_complete:
            return cut
        return self._get((fingerprint, False), lambda: self._uncut(inputs))

    def is_cut(self, inputs: Inputs) -> bool:
        """Whether training may use several chunks or shards for this graph."""
        return self._partitioner.num_chunks(inputs) * self._transport.mesh.num_shards > 1

    def plan_to_measure(self, fingerprint: int, inputs: Inputs) -> ChunkPlan:
        """Return a plan with as many chunks as in training, without METIS."""
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


_RANDOM = (
    "If they are new in every step, draw the random numbers in the module's forward, shaped like "
    "its tensors (dropout, torch.rand_like). For small augmentation there is "
    "GNNPipeStrategy(changing_inputs='allow'); with known labels among the inputs it leaks the "
    "hidden ones."
)
_SAMPLED = (
    "If every batch is a new graph (NeighborLoader, dropped edges), no step is pipelined: train on "
    "one device, or on the whole graph."
)

_MOST_KEPT = 32
_MOST_BYTES = 2 << 30
_MOST_SEEN = 1024


class KnownInputs:
    """Histories by input number; `seen` has the last training pass on each recent input.

    `saved` are loaded histories of a resumed run that no step has taken yet.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        self.seen: OrderedDict[int, int] = OrderedDict()
        self.last: dict[int, InputKey] = {}  # by call in the step
        self.saved: dict[int, SavedHistories] = {}
        self.num_saved_layers = 0
        self.num_changed = 0
        self._kept: dict[int, Histories] = {}
        self._is_quiet = is_quiet
        self._fallbacks = Fallbacks(log, is_quiet=is_quiet)

    def resume(self, run: SavedRun) -> None:
        """Go on with the inputs of a loaded run."""
        self.saved, self.num_saved_layers = run.histories(), sum(run.state.stage_layers)
        self.seen.update(run.state.seen)

    def __iter__(self) -> Iterator[Histories]:
        return iter(self._kept.values())

    def items(self) -> list[tuple[int, Histories]]:
        """Return pairs of input number and histories."""
        return list(self._kept.items())

    def get(self, number: int) -> Histories | None:
        """Return the histories of an input; None if it has none."""
        return self._kept.get(number)

    def keep(self, number: int, histories: Histories) -> None:
        """Store the histories of an input."""
        self._kept[number] = histories

    def admits(self, key: InputKey, num_bytes: int) -> bool:
        """Whether to keep histories for a new input; may drop the least recently used ones."""
        number = key.number
        if number in self.saved or not self._kept or key.call not in self.last:
            return True
        if number not in self.seen:
            return False
        most = max(1, min(_MOST_KEPT, _MOST_BYTES // max(num_bytes, 1)))
        if len(self._kept) + len(self.saved) < most:
            return True
        oldest = min(self._kept, key=lambda one: self._kept[one].last_step)
        if self._kept[oldest].last_step < self.seen[number]:
            self._kept.pop(oldest).drain()
            return True
        self._tell_of_bound(most, num_bytes)
        return False

    def note(self, key: InputKey, step: int) -> None:
        """Record that training pass `step` ran on this input."""
        self.last[key.call] = key
        self.seen[key.number] = step
        self.seen.move_to_end(key.number)
        while len(self.seen) > _MOST_SEEN:
            self.seen.popitem(last=False)

    def ask_refresh(self) -> None:
        """Request that the next step on each input recomputes all rows first."""
        for histories in self._kept.values():
            histories.ask_refresh()

    def drop_rows(self) -> None:
        """Drop all rows; the next step on each input is exact."""
        self.saved.clear()
        for histories in self._kept.values():
            histories.drop()

    def tell_change(self, key: InputKey) -> None:
        """Warn once that a step is exact because its input differs from the last."""
        last = self.last.get(key.call)
        names = [] if last is None else key.changed(last)
        self.num_changed += bool(names)
        if names:
            is_random = last is None or key.graph == last.graph
            self._fallbacks.tell(
                f"{', '.join(names[:3])} of the pipelined module changed since the last step",
                origin="pipelined steps",
                to="an exact step for each new input. Rows of neighbours are read from earlier "
                "steps on the same input only; an input that repeats is pipelined from its third "
                "step on",
                remedy=_RANDOM if is_random else _SAMPLED,
            )

    def tell_share(self, num_steps: int) -> None:
        """Warn how many steps were exact because of new inputs, if any were."""
        if self.num_changed and not self._is_quiet:
            log.warning(
                "%d of %d training steps were exact, since their inputs were new.",
                self.num_changed,
                num_steps,
            )

    def _tell_of_bound(self, most: int, num_bytes: int) -> None:
        self._fallbacks.tell(
            f"Histories are kept for {most} inputs of {num_bytes >> 20} MiB per rank (at most "
            f"{_MOST_KEPT} inputs and {_MOST_BYTES >> 30} GiB)",
            origin="pipelined steps",
            to="exact steps on further inputs",
        )

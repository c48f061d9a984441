"""Planned graphs, and the historical embeddings of each input of the pipelined module.

An input is a graph, its features, and all other arguments. A step reads only rows that a step on
the same input has written.

The first step on an input is exact, the next ones are pipelined:

    step     1      2      3      4      5      6        inputs a, b, c in turn
    input    a      b      c      a      b      c
             exact  exact  exact  stale  stale  stale

Histories of up to 16 inputs are kept; a new one takes the place of the least recently used.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gnnpipe.calls import Inputs
from lightning_gnnpipe.chunks import CapturedChunks, PlannedInputs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.identity import FLOAT, InputKey
from lightning_gnnpipe.engine.shared import SharedStore
from lightning_gnnpipe.errors import Fallbacks
from lightning_gnnpipe.graph import (
    ChunkPlan,
    StoredGraph,
    check_graph,
    edge_cut_frac,
    keep_parts,
    partition_nodes,
    plan_from_assignment,
    shard_plan,
    split_chunks,
    tensor_fingerprint,
    text_fingerprint,
)
from lightning_gnnpipe.options import RunOptions
from lightning_gnnpipe.passing import GraphEdges, Masks, MessageContext
from lightning_gnnpipe.staleness import FreeTables, HistoryOptions, HistoryStore, HostCopies

if TYPE_CHECKING:
    from lightning_gnnpipe.engine.resume import SavedHistories, SavedRun

log = logging.getLogger(__name__)

_NUM_IDLE = 4


class PlannedGraph:
    """One graph, or this rank's shard of it.

    `cut_frac`: share of edges between chunks. `reading` serves passes that write no histories.
    `free_tables`: of exact passes in chunks, for the next pass. `folder`: of the files that hold
    tables and matrices; None for memory.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        transport: Transport,
        folder: Path | None,
        cut_frac: float = 0.0,
    ) -> None:
        self.plan, self.cut_frac = plan, cut_frac
        self.inputs = PlannedInputs(plan)
        store = None if plan.shard is None else SharedStore(plan, transport, keeps_rows=False)
        self.free_tables: FreeTables = {}
        copies = HostCopies(None, folder)
        copies.spare = self.free_tables
        self.reading = MessageContext(store, plan, GraphEdges(plan, copies.keep))


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

    def renew(self) -> None:
        """Record that an exact pass without dropout has written all rows."""
        self.store.on_renewed()
        self.is_renewed, self.is_refresh_due = True, False

    def settle(self) -> None:
        """Wait for messages between shards, and keep them."""
        if isinstance(self.store, SharedStore):
            self.store.settle()

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
        self.store.copies.spare = graph.free_tables
        self.writing = MessageContext(self.store, plan, graph.reading.edges)
        self.captured: CapturedChunks | None = None  # once asked for
        self.masks = Masks()


class GraphCache:
    """The last graphs by content, and their histories; `trained`: of the last training step."""

    def __init__(self, options: RunOptions, transport: Transport) -> None:
        self.inputs = KnownInputs(is_quiet=not transport.world.is_root)
        self.trained: Histories | None = None
        self._options, self._transport = options, transport
        self._graphs: OrderedDict[tuple[int, bool], PlannedGraph] = OrderedDict()
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)

    @property
    def histories(self) -> HistoryOptions:
        """How histories are kept, where the layers compute."""
        return self._options.given.histories.seen_from(self._transport.world.device)

    @property
    def num_bytes(self) -> int:
        """Bytes that the largest input kept on this rank takes, with its histories."""
        kept = self.inputs.kept.values()
        return max((one.store.num_bytes + one.inputs.num_bytes for one in kept), default=0)

    def for_training(self, key: InputKey, inputs: Inputs, num_bytes: int) -> Histories:
        """Return the histories for the input of a training step; empty if it is new."""
        kept = self.inputs.kept
        found = kept.get(key.number)
        if found is None:
            self.inputs.make_room(key, num_bytes)
            graph, is_first = self.cut(key.graph, inputs), key.call == 0
            found = Histories(graph, self.histories, self._transport, is_first=is_first)
            kept[key.number] = found
        kept.move_to_end(key.number)  # the most recently used
        if self.trained is not None and self.trained is not found:
            self.trained.settle()
        self.trained = found
        return found

    def cut(self, fingerprint: int, inputs: Inputs) -> PlannedGraph:
        graph = self._get(fingerprint, inputs, is_cut=True)
        if self.histories.is_too_narrow:
            self._fallbacks.tell(
                "Gradients that linear layers exchange keep their own dtype, since "
                "history_dtype=%s has no room for small ones.",
                self.histories.dtype,
            )
        self._graphs.pop((fingerprint, False), None)
        return graph

    def for_inference(self, fingerprint: int, inputs: Inputs) -> PlannedGraph:
        """Return the training plan of the graph, if there is one.

        With `exact_in_chunks` a graph that these chunks do not fit is one chunk.
        """
        cut = self._graphs.get((fingerprint, True))
        if cut is not None:
            return cut
        is_cut = self._options.given.exact_in_chunks and self._options.fits(inputs.num_nodes)
        return self._get(fingerprint, inputs, is_cut=is_cut)

    def is_cut(self, inputs: Inputs) -> bool:
        """Whether training may use several chunks or shards for this graph, or for larger ones."""
        if not self._options.fits(inputs.num_nodes):
            return True
        return self._options.count_chunks(inputs.num_nodes) * self._transport.mesh.num_shards > 1

    def cut_to_measure(self, fingerprint: int, inputs: Inputs) -> GraphEdges | int:
        """Return the edges of the whole graph if its plan is known, else its number of chunks."""
        cut = self._graphs.get((fingerprint, True))
        if cut is None and self.find_stored(fingerprint, inputs) is not None:
            cut = self.cut(fingerprint, inputs)
        if cut is not None and cut.plan.shard is None:
            return cut.reading.edges
        return self._options.count_chunks(inputs.num_nodes)

    def _get(self, fingerprint: int, inputs: Inputs, *, is_cut: bool) -> PlannedGraph:
        key = fingerprint, is_cut
        if key not in self._graphs:
            with torch.inference_mode(False), torch.no_grad():
                made = self._graphs[key] = self._plan(fingerprint, inputs, is_cut)
            used = [made, *(one.graph for one in self.inputs.kept.values())]
            idle = [k for k, graph in self._graphs.items() if graph not in used]
            for one in idle[: max(0, len(idle) - _NUM_IDLE)]:
                del self._graphs[one]
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _plan(self, fingerprint: int, inputs: Inputs, is_cut: bool) -> PlannedGraph:
        """Return the plan of the graph, or of this rank's shard."""
        edge_index, num_nodes = inputs.edge_index.cpu(), inputs.num_nodes
        options, folder = self._options, self._options.given.plan_folder
        index, num_shards = self._transport.mesh.shard, self._transport.mesh.num_shards
        tables = self.histories.folder
        stored = self.find_stored(fingerprint, inputs, is_cut=is_cut)
        if stored is not None:
            plan = stored.plan.to(self._transport.world.device)
            if not is_cut or options.count_chunks(num_nodes) == 1:
                return PlannedGraph(plan.whole, self._transport, tables)
            return PlannedGraph(plan, self._transport, tables, stored.cut_frac)
        if options.stored is None or options.stored.number != fingerprint:
            check_graph(edge_index, num_nodes)
        assignment = torch.zeros(num_nodes, dtype=torch.int64)
        if is_cut:
            assignment = self._assign(fingerprint, edge_index, num_nodes)
        if num_shards == 1:
            plan = plan_from_assignment(edge_index, num_nodes, assignment)
        else:
            split = partial(split_chunks, edge_index, assignment, num_shards)
            numbers = fingerprint, tensor_fingerprint(assignment), num_shards
            shards = self._transport.run_on_first(partial(keep_parts, folder, numbers, split))
            plan = shard_plan(edge_index, assignment, shards, index=index, num_shards=num_shards)
        return PlannedGraph(
            plan.with_edge_sets(inputs.edge_sizes).to(self._transport.world.device),
            self._transport,
            tables,
            edge_cut_frac(edge_index, assignment),
        )

    def find_stored(
        self, fingerprint: int, inputs: Inputs, *, is_cut: bool = True
    ) -> StoredGraph | None:
        """Return the folder's plan, if it is the plan of this graph."""
        options, stored = self._options, self._options.stored
        is_sharded = self._transport.mesh.num_shards > 1
        if stored is None or stored.number != fingerprint or is_sharded:
            return None
        is_whole = not is_cut or options.count_chunks(inputs.num_nodes) == 1
        return stored if is_whole or options.cut.partition is stored.parts else None

    def _assign(self, fingerprint: int, edge_index: Tensor, num_nodes: int) -> Tensor:
        """Return `[num_nodes]` the chunk of each node."""
        num_chunks = self._options.count_chunks(num_nodes)
        method, folder = self._options.cut.partition, self._options.given.plan_folder
        work = partial(partition_nodes, edge_index, num_nodes, num_chunks=num_chunks, method=method)
        if isinstance(method, str) and num_chunks > 1:
            numbers = fingerprint, num_chunks, text_fingerprint(method)
            work = partial(keep_parts, folder, numbers, work)
        return self._transport.run_on_first(work)


_RANDOM = (
    "Draw random numbers in the module's forward, shaped like its tensors (dropout, "
    "torch.rand_like). If layers outside of it compute its input, a change of their attributes, "
    "such as a counter, is a new input as well: count in a callback."
)
_SCHEDULED = (
    "Keep a float that a schedule changes in a parameter without gradient, since weights are no "
    "input: self.tau = nn.Parameter(torch.tensor(0.5), requires_grad=False) in __init__, and "
    "self.net.tau.data.fill_(0.4) in on_train_epoch_start."
)
_SAMPLED = (
    "Each new graph is also partitioned anew: if every batch is one (NeighborLoader, dropped "
    "edges), train on one device."
)

_MOST_KEPT = 16
_MOST_BYTES = 2 << 30


class KnownInputs:
    """Histories by input number, the least recently used first.

    `kept` are those in use; `saved` are of a resumed run, and no step has taken them yet.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        self.kept: OrderedDict[int, Histories] = OrderedDict()
        self.saved: dict[int, SavedHistories] = {}
        self.num_saved_layers, self.lack = 0, ""  # the latter: see `SavedRun`
        self._last: dict[int, InputKey] = {}  # by call in the step
        self._num_new = 0  # steps that were exact because their input was new
        self._changed: list[str] = []  # what was new in the last of them
        self._remedy = ""
        self._fallbacks = Fallbacks(log, is_quiet=is_quiet)

    def resume(self, run: SavedRun) -> None:
        self.saved, self.num_saved_layers = run.histories(), sum(run.state.stage_layers)
        self.lack = run.lack

    def ask_refresh(self) -> None:
        """Have all rows of each input recomputed before its next step, unless they are new."""
        for one in self.kept.values():
            one.is_refresh_due = not one.is_renewed
        for number, saved in self.saved.items():
            self.saved[number] = saved.noting(is_refresh_due=not saved.state.is_renewed)

    def end_step(self, own: Histories, number: int, frozen: tuple[bool, ...]) -> None:
        """Record that training pass `number` has written all rows of `own`.

        Weights will have changed: no input has new rows any more.
        """
        own.last_step, own.frozen, own.is_refresh_due = number, frozen, False
        for one in self.kept.values():
            one.is_renewed = False
        for number, saved in self.saved.items():
            self.saved[number] = saved.noting(is_renewed=False)

    def make_room(self, key: InputKey, num_bytes: int) -> None:
        """Drop the least recently used inputs until one more of `num_bytes` has room."""
        most = max(key.call + 1, min(_MOST_KEPT, _MOST_BYTES // max(num_bytes, 1)))
        untaken = [number for number in self.saved if number != key.number]
        while len(self.kept) + len(untaken) >= most:
            if untaken:  # no step has used them since the run was resumed
                del self.saved[untaken.pop(0)]
            else:
                self.kept.popitem(last=False)[1].drain()

    def note(self, key: InputKey, num_steps: int, *, is_new: bool) -> None:
        """Count step `num_steps`; `is_new`: it is exact because its input is new."""
        last, self._last[key.call] = self._last.get(key.call), key
        self._num_new += is_new
        if is_new and last is not None:
            self._changed = key.changed(last)
            self._remedy = _RANDOM if key.graph == last.graph else _SAMPLED
            if all(name.endswith(FLOAT) for name in self._changed):
                self._remedy = _SCHEDULED
            if self._num_new > _MOST_KEPT:
                self.tell_share(num_steps)

    def drop_rows(self, *, waits: bool = True) -> None:
        """Drop all rows, after messages have arrived; the next step on each input is exact."""
        self.saved.clear()
        for histories in self.kept.values():
            histories.drop(waits=waits)

    def tell_share(self, num_steps: int) -> None:
        """Warn once if most of `num_steps` training steps were exact because of new inputs."""
        if self._changed and 2 * self._num_new > num_steps:
            self._fallbacks.tell(
                "%d of %d training steps ran exactly, not pipelined, because %s of the pipelined "
                "module had changed; historical embeddings are read on the same input only. %s",
                self._num_new,
                num_steps,
                ", ".join(self._changed[:3]),
                self._remedy,
            )

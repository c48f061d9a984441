"""Finds the tensors that a forward reads beside its arguments, and adds them to the call as leaves.

These are data of the module or the script, what is made in forward (`torch.arange(n)`), parameters
with a row per node or edge, and results of data that are wrong on chunks (`degree(row, n)`). As
leaves they are cut by chunk; such a parameter stays a weight of the stages that read it. Other
parameters and buffers are no leaves; each stage reads them whole.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch_geometric.data import Data

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.calls import Call, Held, count_nodes, find_edge_sets, is_of_pairs
from lightning_gnnpipe.errors import GNNPipeError
from lightning_gnnpipe.layers import find_convs, without_memory
from lightning_gnnpipe.passing import Matrices, is_matrix
from lightning_gnnpipe.stages.find import calls_passing, switched
from lightning_gnnpipe.stages.reads import Reads
from lightning_gnnpipe.stages.shapes import Answer, Questions
from lightning_gnnpipe.stages.trace import random_states, trace
from lightning_gnnpipe.stages.tracer import Met, find_folded, root_of
from lightning_gnnpipe.stages.values import Sample, learn_facts, undisturbed

_MOST = 32  # calls to remember


@dataclass(frozen=True, slots=True)
class _Found:
    """What a call reads beside its arguments."""

    held: tuple[Held, ...] = ()
    num_nodes: int = 0
    results: _Results | None = None


class HeldTensors:
    """Adds the tensors that `module` holds to each call; a new call is traced once to find them.

    `trial` raises an error if a call cannot run in chunks.
    """

    def __init__(
        self,
        module: nn.Module,
        trial: Callable[[Call], object],
        matrices: Matrices,
    ) -> None:
        self._module, self._try = module, trial
        self._matrices = matrices
        # What is found holds while the reads have these values.
        self._known: dict[Hashable, tuple[Reads, tuple[Hashable, ...], _Found]] = {}
        self.without: set[Hashable] = set()  # signatures of calls that read only arguments

    def known(self, call: Call) -> Call | None:
        """Return the call with what it reads as leaves; None for a call that is new."""
        known = self._known.get(self._key(call, is_training=self._module.training))
        if known is None or known[0].values() != known[1]:
            return None
        return self._with(call, known[2])

    def find(self, call: Call) -> Call:
        """Find what a new call reads, in both modes; return the call with it as leaves."""
        is_training, met, modes = self._module.training, Met(), {}
        for mode in (is_training, not is_training):
            with switched(self._module, mode):
                try:
                    _, reads, own = self._trace(call)
                except Exception:  # it fails again in the trace that counts, which raises it
                    continue
                met.add(own)
                modes[mode] = reads, reads.values()
        found = self._choose(call, met)
        # A width may equal the number of nodes or edges by chance: then the data alone run.
        data = replace(found, held=tuple(one for one in found.held if one.weight is None))
        if not self._runs(self._with(call, found)):
            folded = self._fold(self._with(call, found), found)
            if folded is not None and self._runs(self._with(call, folded)):
                found = folded
            elif len(data.held) < len(found.held) and self._runs(self._with(call, data)):
                found = data
        if not found.held and found.results is None:
            self.without.add(call.signature)
            return call
        if found.results is not None:  # of this mode's operations
            modes = {mode: one for mode, one in modes.items() if mode == is_training}
        for mode, one in modes.items():
            if len(self._known) >= _MOST:
                del self._known[next(iter(self._known))]
            self._known[self._key(call, is_training=mode)] = *one, found
        return self._with(call, found)

    def _key(self, call: Call, *, is_training: bool) -> Hashable:
        leaves = tuple((leaf.shape, leaf.requires_grad) for leaf in call.leaves)
        return call.signature, is_training, leaves

    def _runs(self, call: Call) -> bool:
        """Whether a call is not refused; other errors are raised later."""
        try:
            self._try(call)
        except Exception as error:
            return not isinstance(error, GNNPipeError)
        return True

    def _with(self, call: Call, found: _Found) -> Call:
        held = [replace(one, value=self._present(one)) for one in found.held]
        call = call.with_held(held, found.num_nodes, self._matrices) if held else call
        if found.results is None:
            return call
        return call.with_held(found.results.of(call), call.num_nodes, self._matrices)

    def _present(self, held: Held) -> Any:
        """Return the present value."""
        return held.value if held.weight is None else self._module.get_parameter(held.weight)

    def _trace(self, call: Call) -> tuple[fx.Graph, Reads, Met]:
        module = self._module
        with without_memory(find_convs(module)), torch.inference_mode(False), undisturbed(module):
            questions = Questions(lambda graph, root: _answer(graph, root, call))
            records = torch.is_grad_enabled()
            return trace(module, call, questions, is_grad_enabled=records, is_trial=True)

    def _fold(self, call: Call, found: _Found) -> _Found | None:
        """Return `found` with the results of operations on data; None if there are none."""
        before, states = random_states(), (random.getstate(), np.random.get_state())
        try:
            with torch.random.fork_rng(devices=[]):
                graph, _, _ = self._trace(call)
                facts = _answer(graph, root_of(self._module), call)
                results = _Results(graph, call, self._module, facts)
                held = results.of(call)
                is_random = before != random_states()  # new numbers in each call
        except Exception:  # then the call is refused as it is
            return None
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
        return replace(found, results=results) if held and not is_random else None

    def _choose(self, call: Call, met: Met) -> _Found:
        """Return the tensors to add, and the number of nodes.

        Raises GraphError if the call holds tensors and shows no edges or no number of nodes.
        """
        names = dict(_named_tensors(self._module))
        held = [
            Held(_name_of(names.get(id(one), f"kept.{number}"), one), one)
            for number, one in enumerate(met.kept)
        ]
        held += [Held(f"made.{number}", one, is_made=True) for number, one in enumerate(met.made)]
        named = [
            Held(_name_of(name, one), one, name if isinstance(one, nn.Parameter) else None)
            for name, one in met.named.items()
        ]
        held += [one for one in named if is_matrix(one.value) or _is_edges(one.value)]
        if not held and not named:
            return _Found()
        try:
            counted, num_nodes = self._count(call, [*held, *named])
        except GNNPipeError:
            if held:
                raise
            return _Found()
        rest = [one for one in named if one not in held]
        held += [one for one in rest if one.value.dim() and one.value.size(0) in counted]
        return _Found(tuple(held), num_nodes)

    def _count(self, call: Call, several: Sequence[Held]) -> tuple[set[int], int]:
        """Return the numbers of rows of nodes and edges, and the number of nodes."""
        data = [one for one in several if one.weight is None]
        with_edges = call.with_held(data, 0, self._matrices)
        edges = find_edge_sets(with_edges)
        ends = [with_edges.leaves[slot] for slot in edges.slots]
        lowest = 1 + max((int(one.max()) for one in ends if one.numel()), default=-1)
        rows = [
            one.value.size(0)
            for one in several
            if isinstance(one.value, Tensor) and one.value.dim() and not _is_edges(one.value)
        ]
        likely = [size for size in rows if size >= lowest and size not in edges.sizes]
        try:
            num_nodes = count_nodes(call, find_edge_sets(call, needs_edges=False))
        except GNNPipeError:
            if not likely:
                raise
            num_nodes = likely[0]
        return {num_nodes, *edges.sizes}, num_nodes


class _Results:
    """Results of a trace's operations on data; computed anew when the data change.

    `facts`: answers about shapes, for those that are not of data.
    """

    def __init__(
        self, trace: fx.Graph, call: Call, module: nn.Module, facts: Mapping[str, Answer]
    ) -> None:
        folded = find_folded(trace, call)
        graph, copies = fx.Graph(), dict[fx.Node, Any]()
        for node in trace.nodes:
            if node in folded and all(source in copies for source in node.all_input_nodes):
                copies[node] = graph.node_copy(node, copies.__getitem__)
            elif node in folded:
                copies[node] = facts[node.name].value
        leaves = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        self._slots = [int(name.removeprefix("leaf_")) for name in leaves]
        output = graph.output(tuple(copies.values()))
        self._run = fx.GraphModule(nn.Module(), graph)
        values = dict(zip(copies, self._results(call), strict=True))
        ends = _ends_of(values)
        output.args = (tuple(copies[node] for node in ends),)
        self._run.recompile()
        root = root_of(module)

        def reads_edges(node: fx.Node) -> bool:
            return calls_passing(node, root) or _is_row_of_edges(node, values)

        self._of_edges = [any(map(reads_edges, node.users)) for node in ends]
        self._nodes = [node.name for node in ends]
        self._before: list[tuple[Tensor, int]] = []
        self._values: tuple[Any, ...] = (None,) * len(ends)

    def _results(self, call: Call) -> tuple[Any, ...]:
        with torch.inference_mode(False), torch.no_grad():
            return tuple(self._run(*(call.leaves[slot] for slot in self._slots)))

    def of(self, call: Call) -> list[Held]:
        """Return the results for the leaves of `call`."""
        now = [(call.leaves[slot], version_of(call.leaves[slot])) for slot in self._slots]
        pairs = zip(self._before, now, strict=False)
        if not self._before or any(a[0] is not b[0] or a[1] != b[1] or b[1] < 0 for a, b in pairs):
            self._values = tuple(map(_unless_equal, self._values, self._results(call)))
            self._before = now
        held = []
        for name, value, is_of_edges in zip(self._nodes, self._values, self._of_edges, strict=True):
            if isinstance(value, Tensor) or is_matrix(value):
                is_edges = isinstance(value, Tensor) and is_of_edges and _is_edges(value)
                label = f"result_{name}" + ("_edge_index" if is_edges else "")
                held.append(Held(label, value, None, node=name))
        return held


def _ends_of(values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """Return the operations on data, with results `values`, that the rest of a trace reads.

    Rows of edges, as in `row, col = edge_index`, are none: a chunk numbers its own nodes.
    """

    def is_read(node: fx.Node, by: Collection[fx.Node] = ()) -> bool:
        return any(user not in values or user in by for user in node.users)

    rows = {node for node in values if _is_row_of_edges(node, values) and is_read(node)}
    inner = (node for node in values if node.op != "placeholder" and node not in rows)
    return [node for node in inner if is_read(node, rows)]


def _is_row_of_edges(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    if node.target is not operator.getitem or type(node.args[1]) is not int:
        return False
    edges = values.get(cast(fx.Node, node.args[0]))
    return isinstance(edges, Tensor) and _is_edges(edges)


def _unless_equal(old: Any, new: Any) -> Any:
    """Return `old` if `new` is the same, so that what is known of it holds."""
    is_dense = isinstance(old, Tensor) and isinstance(new, Tensor)
    is_dense = is_dense and old.layout is new.layout is torch.strided
    is_same = is_dense and old.dtype == new.dtype and torch.equal(old, new)
    return old if is_same else new


def _answer(graph: fx.Graph, root: nn.Module, call: Call) -> dict[str, Answer]:
    """Answer what forward asks of shapes, by a run on the whole graph."""
    whole = Sample(call.leaves, -1, torch.empty(2, 0), (), is_whole=True)
    return learn_facts(graph, root, [whole], lambda kind, number: 0, (), "")


def _is_edges(value: Tensor) -> bool:
    is_index = value.dtype in (torch.int64, torch.int32)
    return is_index and value.dim() == 2 and value.size(0) == 2


def _name_of(name: str, value: Any) -> str:
    """Return the name of a held tensor, which shows that edges are edges."""
    is_shown = "edge_index" in name or is_of_pairs(name) or not isinstance(value, Tensor)
    return name if is_shown or not _is_edges(value) else f"{name}_edge_index"


def _named_tensors(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield id and name of the tensors that attributes of modules hold, in graphs as well."""
    for prefix, one in module.named_modules():
        for key, value in vars(one).items():
            parts: Iterable[tuple[str, Any]] = [(key, value)]
            if isinstance(value, Data):
                parts = [(f"{key}.{name}", item) for name, item in value]
            for name, item in parts:
                if isinstance(item, Tensor) or is_matrix(item):
                    yield id(item), f"{prefix}.{name}".removeprefix(".")

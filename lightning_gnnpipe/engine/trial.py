"""A trial run of a model's layers on a small graph, on one rank, with histories of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gnnpipe.engine.chunk_run import run_segments
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.names import LayerNames
from lightning_gnnpipe.errors import UnsupportedError, explain, first_line
from lightning_gnnpipe.graph import Chunk, ChunkPlan, plan_from_assignment
from lightning_gnnpipe.history import HistoryStore
from lightning_gnnpipe.passing import MessageContext, find_layers, intercept
from lightning_gnnpipe.stages import Call, Inputs, Kind, Layers, Segment
from lightning_gnnpipe.user_code import at, line_of

NUM_CHUNKS = 3
REMEDY = (
    "Something outside of message passing looks at more than one row, or at the neighbours of a "
    "node: normalise and pool outside of the pipelined module, pass degrees in as a node-level "
    "tensor, or train with num_chunks=1."
)


class Trial:
    """Runs layers over a small graph that is cut into a few chunks.

    Args:
        module: The pipelined module.
        layers: Its layers.
        call: Arguments that hold the small graph.
        kinds: What they are.
    """

    def __init__(self, module: nn.Module, layers: Layers, call: Call, kinds: Inputs) -> None:
        device, num_nodes = kinds.edge_index.device, kinds.num_nodes
        plan = plan_from_assignment(kinds.edge_index.cpu(), num_nodes, chunk_of_node(num_nodes))
        self.plan: ChunkPlan = plan.with_edge_sets(kinds.edge_sizes).to(device)
        self.layers = layers
        self._kinds = kinds
        self.inputs = PlannedInputs(self.plan)
        self.inputs.load(call, kinds)
        self.store = HistoryStore(plan.num_nodes, plan.num_chunks)
        self.context = MessageContext(self.store, self.plan)
        self.context.leaves = self.inputs
        self._intercepted = find_layers(module)
        self.names = LayerNames(module)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the layers run on chunks within the block, and refuse a model that fails there."""
        with (
            refusing_errors("a chunk of the graph", REMEDY),
            intercept(self._intercepted, self.context),
        ):
            yield

    def run(self, segments: tuple[Segment, ...], chunk: Chunk, values: dict[str, Tensor]) -> None:
        """Run `segments` over `chunk`; what they compute is added to `values`."""
        run_segments(segments, values, chunk, self.context)

    def slice_leaves(self, segments: tuple[Segment, ...], chunk: Chunk) -> dict[str, Tensor]:
        """Return the chunk's parts of the leaves that `segments` read, by name."""
        names = {name for segment in segments for name in segment.inputs}
        return self.inputs.slice(chunk, {name for name in names if name.startswith("leaf_")})

    def forward(self, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """Run all layers over `chunks`, which hold all nodes.

        Returns:
            Every node-level value, `[num_nodes, *]`, in the order of nodes, by name.
        """
        segments, found = self.layers.segments, dict[str, Tensor]()
        with self.running():
            for chunk in chunks:
                values = self.slice_leaves(segments, chunk)
                self.run(segments, chunk, values)
                rows = self.plan.perm[chunk.start : chunk.end]
                for name in self.layer_of_value:
                    value = values[name]
                    if name not in found:
                        found[name] = value.new_zeros((self.plan.num_nodes, *value.shape[1:]))
                    found[name][rows] = value
        return found

    @property
    def layer_of_value(self) -> dict[str, Segment]:
        """Which layer computes each node-level value, in order."""
        computed = {
            n: segment for segment in reversed(self.layers.segments) for n in segment.outputs
        }
        order = dict.fromkeys(n for segment in self.layers.segments for n in segment.outputs)
        is_row = {n for n, value in self.layers.values.items() if value.kind is Kind.NODE}
        return {name: computed[name] for name in order if name in is_row}

    def kind_of(self, name: str) -> tuple[Kind, int]:
        """Return what the rows of a value or leaf are, and of which edge set."""
        if name.startswith("leaf_"):
            slot = int(name.removeprefix("leaf_"))
            return self._kinds.kinds[slot], self._kinds.edge_sets[slot]
        value = self.layers.values[name]
        return value.kind, value.edge_set


def flatten(output: object) -> list[Tensor]:
    """Return the tensors of a module's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in flatten(item)]
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in flatten(item)]
    return []


def as_real(tensor: Tensor) -> Tensor:
    """Return the numbers of `tensor` as a dense, real one: complex ones as pairs."""
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def chunk_of_node(num_nodes: int) -> Tensor:
    """Return the chunk of each node of a small graph, `[num_nodes]`."""
    return torch.arange(num_nodes) % min(NUM_CHUNKS, num_nodes)


def refuse_difference(what: str, layer: str, size: float) -> UnsupportedError:
    """Return the error for chunks that give something else than the whole graph."""
    return UnsupportedError(
        explain(
            expected=f"the model to give the same {what} in chunks of a small graph as plainly",
            found=f"a difference of {size:.2g} that begins at or beside layer '{layer}'",
            remedy=REMEDY,
        )
    )


@contextmanager
def refusing_errors(part: str, remedy: str) -> Iterator[None]:
    """Refuse a model that fails within the block, when it runs on `part`."""
    try:
        yield
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            explain(
                expected=f"the model to run on {part}",
                found=f"{type(error).__name__}: {first_line(error)}{at(line_of(error))}",
                remedy=remedy,
            )
        ) from error

"""What each value of a traced graph is.

It is learned by running it once on a small sample of the user's graph. The sample has fewer nodes
than edges or the other way round, never as many, so that the first dimension of every value tells
whether it has one row a node or one row an edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import MeshCNNConv

from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.stages.call import Call
from lightning_gnnpipe.stages.kinds import Inputs, Kind
from lightning_gnnpipe.stages.trace import root_of

_SAMPLE_EDGES = 48
_GROUP = 4  # Edges that MeshCNNConv reads together.


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph.

    What its rows are, the shape of a row, its dtype, whether gradients flow through it.
    """

    kind: Kind
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.row_shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Sample:
    """A small graph cut out of the user's: its leaves, in the order of the call, and its size."""

    leaves: tuple[Tensor, ...]
    num_nodes: int
    num_edges: int
    edge_index: Tensor


def draw_sample(module: nn.Module, call: Call, inputs: Inputs) -> Sample:
    """Return some edges of the graph, evenly spaced, with the nodes they join and a few more.

    A layer that reads edges in groups finds them in whole groups.

    Its sizes differ from each other and from the widths of `module`'s parameters, so that they tell
    what a dimension counts.
    """
    edge_index = inputs.edge_index
    widths = {size for p in module.parameters() for size in p.shape}
    group = _GROUP if any(isinstance(m, MeshCNNConv) for m in module.modules()) else 1
    num_groups = edge_index.size(1) // group
    spaced = torch.linspace(0, max(num_groups - 1, 0), min(_SAMPLE_EDGES // group, num_groups))
    first = torch.unique(spaced.long()).to(edge_index.device) * group
    edges = (first[:, None] + torch.arange(group, device=first.device)).flatten()
    extra = torch.arange(min(3, inputs.num_nodes), device=edge_index.device)
    while True:
        nodes = torch.unique(torch.cat([edge_index[:, edges].flatten(), extra]))
        sizes = {nodes.numel(), edges.numel()}
        if (len(sizes) == 2 and not sizes & widths) or edges.numel() < 2 * group:
            break
        edges = edges[:-group]
    renumber = torch.full((inputs.num_nodes,), -1, device=edge_index.device)
    renumber[nodes] = torch.arange(nodes.numel(), device=edge_index.device)
    local = renumber[edge_index[:, edges]]
    take = {Kind.NODE: lambda t: t[nodes], Kind.EDGE: lambda t: t[edges]}
    take |= {Kind.EDGE_INDEX: lambda t: local, Kind.WHOLE: lambda t: t}
    leaves = tuple(
        take[kind](leaf).detach().requires_grad_(leaf.requires_grad)
        for kind, leaf in zip(inputs.kinds, call.leaves, strict=True)
    )
    return Sample(leaves, nodes.numel(), edges.numel(), local)


def learn_values(graph: fx.Graph, module: nn.Module, sample: Sample) -> dict[str, Value]:
    """Run `graph` on `sample` and return what is known of each of its tensors, by node name."""
    values: dict[str, Value] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor):
                values[n.name] = _describe(result, n, sample)
            return result

    runner = Recorder(fx.GraphModule(root_of(module), graph))
    try:
        with undisturbed(module), torch.enable_grad():
            runner.run(*sample.leaves)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise UnsupportedError(
            explain(
                expected="the model to run on a small part of the graph",
                found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                remedy="A parameter with one row a node cannot be cut: look it up by an "
                "nn.Embedding with a node-level index, or pass it in as an argument.",
            )
        ) from error
    return values


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Leave the random number streams and the buffers of `module` as they were before the block."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=_devices(module)):
            yield
    finally:
        restore_buffers(module, buffers)


def _devices(module: nn.Module) -> list[torch.device]:
    return list({p.device for p in module.parameters() if p.device.type == "cuda"})


def restore_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Write `buffers` back into `module`."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def _describe(tensor: Tensor, node: fx.Node, sample: Sample) -> Value:
    rows = tensor.size(0) if tensor.dim() else -1
    kind = {sample.num_nodes: Kind.NODE, sample.num_edges: Kind.EDGE}.get(rows, Kind.WHOLE)
    if node.op == "get_attr":
        kind = Kind.WHOLE
    return Value(kind, tuple(tensor.shape[1:]), tensor.dtype, tensor.requires_grad)

"""Runs the module on a small graph in chunks, without random numbers, for the self-check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.chunks import LayerNames, PlannedInputs, run_segments
from lightning_gnnpipe.errors import UnsupportedError, first_line
from lightning_gnnpipe.graph import Chunk, ChunkPlan, plan_from_assignment
from lightning_gnnpipe.layers import find_layers, intercept
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.stages import Layers, Segment, leaves_of
from lightning_gnnpipe.staleness import HistoryStore
from lightning_gnnpipe.user_code import at, line_of

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout}
_DROPOUTS |= {F.feature_alpha_dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout}


def _no_normal(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
    return torch.zeros(size, **kwargs) if like is None else torch.zeros_like(like)


def _mean_rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, **_: Any) -> Tensor:
    return F.leaky_relu(x, (lower + upper) / 2)


def _first_choice(p: Tensor, num_samples: int, *_: Any, **__: Any) -> Tensor:
    return p.new_zeros((*p.shape[:-1], num_samples), dtype=torch.int64)


def _softmax(logits: Tensor, tau: float = 1, hard: bool = False, *_: Any, **rest: Any) -> Tensor:
    soft = (logits / tau).softmax(rest.get("dim", -1))
    return soft.round() + (soft - soft.detach()) if hard else soft


_RANDOM: dict[Any, Callable[..., Tensor]] = {
    F.rrelu: _mean_rrelu,
    torch.normal: _no_normal,
    torch.rand_like: torch.zeros_like,
    torch.randn_like: torch.zeros_like,
    torch.rand: torch.zeros,
    torch.randn: torch.zeros,
    torch.bernoulli: lambda p, **_: (p > 0.5).to(p.dtype),
    F.gumbel_softmax: _softmax,
    torch.multinomial: _first_choice,
    torch.poisson: lambda rates, *_, **__: rates,
}
_RANDOM |= dict.fromkeys(
    (Tensor.normal_, Tensor.uniform_, Tensor.cauchy_, Tensor.random_),
    lambda x, *_, **__: x.zero_(),
)
_RANDOM |= dict.fromkeys(
    (Tensor.bernoulli_, Tensor.exponential_, Tensor.log_normal_, Tensor.geometric_),
    lambda x, *_, **__: x.fill_(1),
)

# Functions with dropout inside. Its rate is their only positional float.
_WITH_DROPOUT = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
_WITH_DROPOUT |= {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class NoRandomness(TorchFunctionMode):
    """Makes dropout the identity, even in training mode, and random numbers constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _RANDOM:
            kwargs.pop("generator", None)
            return _RANDOM[func](*args, **kwargs)
        if func in _WITH_DROPOUT:
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
            kwargs |= {name: 0.0 for name in kwargs if name == "dropout_p"}
        return func(*args, **kwargs)


NUM_CHUNKS = 3
REMEDY = (
    "Code outside of message passing must treat each node's row by itself, or add up rows of all "
    "nodes, as linear attention does and softmax does not. Normalise and pool outside of the "
    "pipelined module, pass degrees to forward as a node-level tensor, or train with num_chunks=1."
)


class Trial:
    """Runs layers over the small graph that `call` holds, cut into a few chunks."""

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
        """Intercept the layers for runs on chunks; refuse a model that fails within the block."""
        with (
            refusing_errors("a chunk of the graph", REMEDY),
            intercept(self._intercepted, self.context),
        ):
            yield

    def run_all(self, chunk: Chunk) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run all layers over `chunk`; return its parts of leaves, and these with all values."""
        segments = self.layers.segments
        leaves = self.inputs.slice(chunk, leaves_of(segments))
        values = dict(leaves)
        run_segments(segments, values, chunk, self.context)
        return leaves, values

    def forward(self, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        """Run all layers on `chunks`; return values of nodes, and outputs, in the user's order."""
        found: dict[str, Tensor] = {}
        with self.running():
            for chunk in chunks:
                _, values = self.run_all(chunk)
                for name in self.layer_of_value:
                    value, known = values[name], self.layers.values[name]
                    if name not in found:
                        shape = self.inputs.num_places(known), *value.shape[1:]
                        found[name] = value.new_zeros(shape)
                    found[name][self.inputs.places(chunk, known)] = value
        return found

    @property
    def layer_of_value(self) -> dict[str, Segment]:
        """Segment that computes each value of nodes, and each output, in order."""
        rows = {name for name, value in self.layers.values.items() if value.kind is Kind.NODE}
        computed: dict[str, Segment] = {}
        for segment in self.layers.segments:
            for name in segment.outputs:
                if name in rows or name in self.layers.outputs:
                    computed.setdefault(name, segment)
        return computed

    def kind_of(self, name: str) -> tuple[Kind, int]:
        """Return the row kind and edge set of a value or leaf."""
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
    """Return `tensor` as a dense, real tensor; complex numbers become pairs."""
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def chunk_of_node(num_nodes: int) -> Tensor:
    """Return the chunk of each node of a small graph, `[num_nodes]`."""
    return torch.arange(num_nodes) % min(NUM_CHUNKS, num_nodes)


def refuse_difference(what: str, layer: str, size: float) -> UnsupportedError:
    """Return the error for results in chunks that differ from the whole graph's."""
    return UnsupportedError(
        expected=f"the model to compute the same {what} on chunks as on the whole of a small graph",
        found=f"a difference of {size:.2g} that begins in or next to layer '{layer}'",
        remedy=REMEDY,
    )


@contextmanager
def refusing_errors(part: str, remedy: str) -> Iterator[None]:
    """Refuse a model that fails within the block; `part` names the data it runs on."""
    try:
        yield
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            expected=f"the model to run on {part}",
            found=f"{type(error).__name__}: {first_line(error)}{at(line_of(error))}",
            remedy=remedy,
        ) from error

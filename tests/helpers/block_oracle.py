"""The oracle for gradients in blocks: one run of the whole model, one backward, on plain autograd.

It shares no code and no idea of execution with the package. Stale rows are constants of the step
before, so the rows of a layer depend on nothing but the layer before and on constants: the whole
graph can run layer by layer. Each message-passing call runs once for every chunk of readers, on

    row n of the call =  its row                                   if n's chunk is fresh
                         its last row + (its row - its row)        otherwise

where the bracket is zero and has the gradient of its row: a stale row passes its gradient on as if
it had been fresh. Between two blocks an identity gives the block before what it was given a step
ago, and a block whose gradients are n steps late runs with weights n * lookahead steps ahead on
the line through the last two.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import MessagePassing

from tests.helpers.lookahead import Lookahead
from tests.helpers.modules import ReferenceModule
from tests.helpers.record import Step
from tests.helpers.reference import METHODS, Key, source_arguments

# For each net its layers' ends: where few values are alive between one conv and the next.
LAYER_ENDS = {
    "gcn": ["convs_0", "convs_1", "convs_2"],
    "gcnii": ["convs_0", "convs_1", "convs_2"],
    "edge": ["add", "add_1"],
    "sage": ["convs_0", "convs_1"],
    "gat_jk": ["convs_0", "convs_1"],
    "several": ["convs_0", "convs_1"],
    "tied": ["first", "add", "add_1"],
}


class BlockOracle:
    """Compute what a step in chunks has to compute, and its gradients.

    Args:
        name: Key of `NETS`.
        net: The net.
        partition: Chunk of each node, ``[num_nodes]``.
        block_layers: Layers of each block.
        lookahead: How many steps are foreseen for each that a gradient is late.
    """

    def __init__(
        self,
        name: str,
        net: nn.Module,
        partition: Tensor,
        block_layers: Sequence[int],
        lookahead: int,
    ) -> None:
        self.net, self.partition = net, partition
        firsts = [sum(block_layers[: i + 1]) for i in range(len(block_layers) - 1)]
        self.ends = [LAYER_ENDS[name][first - 1] for first in firsts]
        self.live: dict[Key, Tensor] = {}
        self.found: dict[str, Tensor] = {}
        self.waiting: dict[str, Tensor] = {}
        graph = _Tracer().trace(net, concrete_args=_options(net))
        self.traced = fx.GraphModule(net, graph)
        self.ahead = Lookahead(net, self._late_steps(), lookahead)

    def exact(self, *inputs: Tensor) -> Tensor:
        """Run the whole graph as one chunk; nothing waits after it."""
        output = self._run(inputs, torch.zeros_like(self.partition), (0,), is_exact=True)
        if torch.is_grad_enabled():
            self.waiting = {}
        return output

    def chunked(self, *inputs: Tensor, order: Sequence[int]) -> Tensor:
        """Run the chunks in the given order, with the weights of later steps."""
        self.ahead.begin()
        return self._run(inputs, self.partition, order, is_exact=False)

    def end_step(self, *, is_exact: bool) -> None:
        """Have what blocks were given wait."""
        self.ahead.end(is_exact=is_exact)
        self.waiting = {} if is_exact else self.found
        self.found = {}

    def _late_steps(self) -> dict[str, float]:
        """Return how late the gradient of each parameter is, on average over where it is used."""
        used: dict[str, list[int]] = {}
        block = 0
        for node in self.traced.graph.nodes:
            names = [node.target] if node.op == "get_attr" else []
            if node.op == "call_module":
                leaf = self.net.get_submodule(node.target)
                names = [f"{node.target}.{name}" for name, _ in leaf.named_parameters()]
            for name in names:
                used.setdefault(name, []).append(len(self.ends) - block)
            block += node.name in self.ends
        return {name: sum(late) / len(late) for name, late in used.items()}

    def _run(
        self, inputs: Sequence[Tensor], partition: Tensor, order: Sequence[int], *, is_exact: bool
    ) -> Tensor:
        fresh: dict[Key, Tensor] = {}
        place = {chunk: number for number, chunk in enumerate(order)}
        number = torch.tensor([place[chunk] for chunk in partition.tolist()])

        def readers(key: Key, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            fresh[key] = rows.detach().clone()
            for turn in range(len(order)):
                is_fresh = (number <= turn).view(-1, *[1] * (rows.dim() - 1))
                seen = rows
                if not bool(is_fresh.all()):
                    straight = self.live[key] + rows - rows.detach()
                    seen = torch.where(is_fresh, rows, straight)
                yield number == turn, seen

        cut = (lambda name, value: value) if is_exact else self._cut
        with _each_reader(self.net, readers):
            output = _Cutting(self.traced, self.ends, cut).run(*inputs)
        self.live = fresh
        return output

    def _cut(self, name: str, value: Tensor) -> Tensor:
        def give(grad: Tensor) -> Tensor:
            self.found[name] = grad.clone()
            return self.waiting.get(name, grad)

        value = value.view_as(value)
        value.register_hook(give)
        return value


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, MessagePassing) or super().is_leaf_module(m, module_qualified_name)


def _options(net: nn.Module) -> dict[str, None]:
    """Return the arguments of PyG's own models that the tests leave out."""
    given = {"x", "edge_index", "edge_attr"} if net.training else set()
    names = inspect.signature(net.forward).parameters
    return {name: None for name in names if name not in {"x", "edge_index", *given}}


class _Cutting(fx.Interpreter):
    """Runs a traced net; behind some nodes all that is still needed goes through a function."""

    def __init__(
        self, traced: fx.GraphModule, ends: Sequence[str], cut: Callable[[str, Tensor], Tensor]
    ) -> None:
        super().__init__(traced)
        self.ends, self.cut = ends, cut

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name not in self.ends:
            return result
        self.env[n] = result
        position = {node: i for i, node in enumerate(self.module.graph.nodes)}
        for node, value in list(self.env.items()):
            is_alive = any(position[user] > position[n] for user in node.users)
            if is_alive and isinstance(value, Tensor) and value.requires_grad:
                self.env[node] = self.cut(f"{n.name}: {node.name}", value)
        return self.env[n]


@contextmanager
def _each_reader(
    net: nn.Module, readers: Callable[[Key, Tensor], Iterator[tuple[Tensor, Tensor]]]
) -> Iterator[None]:
    """Run every message-passing call once for each chunk of readers."""
    calls: Counter[tuple[str, str]] = Counter()
    convs = [(name, conv) for name, conv in net.named_modules() if isinstance(conv, MessagePassing)]
    for name, conv in convs:
        for method in METHODS:
            setattr(conv, method, _by_reader(name, conv, method, readers, calls))
    try:
        yield
    finally:
        for _, conv in convs:
            for method in METHODS:
                delattr(conv, method)


def _by_reader(
    name: str,
    conv: MessagePassing,
    method: str,
    readers: Callable[[Key, Tensor], Iterator[tuple[Tensor, Tensor]]],
    calls: Counter[tuple[str, str]],
) -> Callable[..., Any]:
    original = getattr(conv, method)
    sources = source_arguments(conv, method)

    def call(edge_index: Tensor, size: Any = None, **kwargs: Any) -> Any:
        number = calls[name, method]
        calls[name, method] += 1
        given = {}
        for argument in sorted(sources & kwargs.keys()):
            value = kwargs[argument]
            rows = value[0] if isinstance(value, tuple) else value
            if rows is not None:
                given[argument] = list(readers((name, method, number, argument), rows))
        total = None
        for turn, (own, _) in enumerate(next(iter(given.values()))):
            seen = dict(kwargs)
            for argument, turns in given.items():
                value = kwargs[argument]
                target = value[1] if isinstance(value, tuple) else value
                seen[argument] = turns[turn][1], target
            result = original(edge_index, size=size, **seen)
            kept = own if method == "propagate" else own[edge_index[1]]
            kept = kept.view(-1, *[1] * (result.dim() - 1))
            total = torch.where(kept, result, torch.zeros_like(result) if total is None else total)
        return total

    return call


def train_in_blocks(
    module: ReferenceModule,
    data: Any,
    oracle: BlockOracle,
    *,
    orders: Callable[[int], Sequence[int]],
    exact_epochs: Sequence[int],
    num_epochs: int,
) -> list[Step]:
    """Train ``module.net`` in place, one optimizer step an epoch, and return the steps."""
    optimizer, steps = module.configure_optimizers(), []
    for epoch in range(num_epochs):
        inputs = module.net_inputs(data)
        is_exact = epoch in exact_epochs
        outputs = (
            oracle.exact(*inputs) if is_exact else oracle.chunked(*inputs, order=orders(epoch))
        )
        loss = module.loss(outputs, data)
        optimizer.zero_grad()
        loss.backward()
        oracle.end_step(is_exact=is_exact)
        named = dict(module.named_parameters())
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in named.items()}
        steps.append(Step(outputs.detach(), loss.detach(), gradients, weights))
    return steps

"""A chunk runs the same operations on the same histories in each step, in any order of chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_gnnpipe._compat_torch import DispatchMode
from lightning_gnnpipe.staleness import METHODS
from tests.helpers.engines import one_process_engine

D, NUM_CHUNKS = 8, 4


class Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Records operations by phase and chunk: names, and shape and memory of what they are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = ""
        self.found: dict[str, list[Any]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_record_function_enter" in name:
            self.place = args[0]
        elif "_record_function_exit" in name:
            self.place = ""
        elif self.place.startswith(("forward", "backward")) and not func.is_view:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            memory = [(start_of(one), one.storage_offset()) for one in given]
            shapes = [tuple(one.shape) for one in given]
            self.found[self.place].append((name, shapes, memory))
        return func(*args, **(kwargs or {}))

    def of(self, place: str, lasting: set[int]) -> list[Any]:
        """Return the operations of a phase of a chunk, with the memory in `lasting` alone."""
        return [
            (name, shapes, [one if one[0] in lasting else None for one in memory])
            for name, shapes, memory in self.found[place]
        ]


def start_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors(owner: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield all tensors that objects of the package reach from `owner`."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, dict | list | tuple | set):
        for one in owner.values() if isinstance(owner, dict) else owner:
            yield from tensors(one, seen)
    elif type(owner).__module__.startswith("lightning_gnnpipe"):
        for name in {*getattr(owner, "__dict__", ()), *getattr(type(owner), "__slots__", ())}:
            yield from tensors(getattr(owner, name), seen)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [gnn.GCNConv(D, D), nn.LayerNorm(D)],
        lambda: [gnn.GCNConv(D, D), nn.BatchNorm1d(D)],
        lambda: [gnn.SAGEConv(D, D), gnn.GraphNorm(D)],
        lambda: [gnn.GINConv(nn.Linear(D, D)), gnn.PairNorm()],
        lambda: [gnn.GATConv(D, D), nn.LayerNorm(D)],
    ],
    ids=["gcn-layer", "gcn-batch", "sage-graph", "gin-pair", "gat-layer"],
)
def test_operations_and_memory_do_not_depend_on_the_order(make: Callable[[], list[Any]]) -> None:
    layers: list[Any] = [(nn.Identity(), "x -> x")]
    for _ in range(2):
        conv, norm = make()
        layers += [(conv, "x, edge_index -> x"), (norm, "x -> x"), nn.ReLU()]
    nodes = torch.arange(3 * NUM_CHUNKS)
    edges = torch.cartesian_prod(nodes, nodes).T
    graph = torch.randn(len(nodes), D), edges[:, edges[0] != edges[1]]
    net = gnn.Sequential("x, edge_index", layers)
    engine = one_process_engine(
        net, partition=nodes % NUM_CHUNKS, method=METHODS["drift"], self_check=False
    )
    for one in net.parameters():
        one.grad = torch.zeros_like(one)
    steps, held = list[Recorder](), list[set[int]]()
    for step in range(7):  # the first is exact
        engine.set_step(step_index=step)
        held.append({start_of(one) for one in tensors(engine.graphs.trained, set())})
        with Recorder() as found:  # type: ignore[no-untyped-call]
            engine.forward(graph, {}).sum().backward()
        steps.append(found)
    lasting = set.intersection(*held[4:])
    assert len(lasting) > 20
    assert len({tuple(one.found) for one in steps[4:]}) == 3  # orders
    for place in steps[4].found:
        first, second, third = (one.of(place, lasting) for one in steps[4:])
        assert first == second == third, place

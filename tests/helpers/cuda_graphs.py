"""CUDA graphs without a GPU: operations on the CPU, recorded and run again on the same tensors.

As on a device,

- a capture computes nothing: its results are NaN, and what it has written is restored;
- it fails where the host would wait for the device, or copies numbers from the host;
- random numbers are those of generators that the graph knows;
- graphs of one pool are replayed in the order of capture, or overwrite each other.

Where there is a GPU (`GNNPIPE_DEVICE`) its own graphs run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_gnnpipe._compat_torch import DispatchMode
from lightning_gnnpipe.engine import passes
from tests.helpers.card import _INDEXING, _READING
from tests.helpers.device import DEVICE

_FAILING = _READING | {"lift_fresh"}  # the latter: numbers of the host


class Counts:
    """Numbers of captures and replays, of all processes."""

    def __init__(self) -> None:
        self.captures, self.replays = (multiprocessing.Value("i") for _ in range(2))


class _Pool:
    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.last = -1  # the place of the one replayed last


class Graph:
    """Instead of `torch.cuda.CUDAGraph`."""

    capturing: Graph | None = None
    counts = Counts()
    pool: _Pool

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        self.operations: list[Callable[[], None]] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        place = self.pool.graphs.index(self)
        assert place in (0, self.pool.last + 1), "not in the order of capture"
        self.pool.last = place
        with self.counts.replays.get_lock():
            self.counts.replays.value += 1
        with torch.no_grad():
            for one in self.operations:
                one()


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph, self._made = graph, dict[int, Tensor]()
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        is_mask = name in _INDEXING and any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in args[1]
        )
        if name in _FAILING or is_mask:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        schema = {one.name: one for one in func._schema.arguments}
        given = [*zip(schema, args, strict=False), *kwargs.items()]
        for argument, value in given:
            alias = schema[argument].alias_info
            for one in tree_leaves(value) if alias is not None and alias.is_write else ():
                self._keep(one)
        found = func(*args, **kwargs)
        if not func.is_view and "record_function" not in name:
            self._note(func, args, kwargs, found)
        return found

    def _keep(self, written: Tensor) -> None:
        storage = written.untyped_storage()
        place = storage.data_ptr()
        if place not in self._made and place not in self._before:
            self._before[place] = storage, storage.clone()

    def _note(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        given = tree_map_only(Tensor, lambda one: one.data, (args, kwargs))
        known = {_place(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        results = [one.data for one in tree_leaves(found) if isinstance(one, Tensor)]
        self._made |= {_place(one): one for one in results if _place(one) not in known}

        def again() -> None:
            new = [o for o in tree_leaves(func(*given[0], **given[1])) if isinstance(o, Tensor)]
            for own, one in zip(results, new, strict=True):
                if _place(own) != _place(one):
                    own.copy_(one)

        self._graph.operations.append(again)

    def undo(self) -> None:
        for storage, copy in self._before.values():
            storage.copy_(copy)
        for one in self._made.values():
            if one.is_floating_point():
                one.fill_(torch.nan)


@contextmanager
def _capture(graph: Graph, pool: _Pool, stream: Any, capture_error_mode: str) -> Iterator[None]:
    recorder = _Recorder(graph)
    Graph.capturing = graph
    try:
        with recorder:  # type: ignore[no-untyped-call]
            yield
        graph.pool = pool
        pool.graphs.append(graph)
        with Graph.counts.captures.get_lock():
            Graph.counts.captures.value += 1
    finally:
        Graph.capturing = None
        recorder.undo()


class _Default:
    """The device's generator: on the CPU the default one."""

    state = torch.Generator()

    def graphsafe_get_state(self) -> torch.Generator:
        return self.state

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self.state, graph = state, Graph.capturing
        if graph is not None:
            assert state in graph.generators
            draw_from = torch.default_generator.manual_seed
            graph.operations.append(lambda: draw_from(state.initial_seed()) and None)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def cuda_graphs() -> Iterator[Counts]:
    """Have CUDA graphs within the block; yields counts of this and of forked processes."""
    Graph.counts = Counts()
    if DEVICE.type == "cuda":
        yield Graph.counts
        return
    own: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph": _capture,
        "graph_pool_handle": _Pool,
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "default_generators": (_Default(),),
    }
    with (
        mock.patch.multiple(torch.cuda, **own),
        mock.patch.object(passes, "can_capture", lambda device: True),
    ):
        yield Graph.counts

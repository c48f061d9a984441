"""Traces the user's forward with torch.fx, down to the message-passing layers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import currentframe
from threading import get_ident
from typing import Any, cast

import numpy as np
import torch
import torch_geometric.nn.conv.gcn_conv
import torch_geometric.nn.pool.glob
import torch_geometric.utils
from torch import fx, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import Aggregation, DeepGCNLayer, HANConv, HGTConv, MessagePassing
from torch_geometric.nn.models.rev_gnn import InvertibleModule
from torch_geometric.utils import spmm as _spmm  # torch.fx patches names without underscore

from lightning_gnnpipe._compat_torch import search_in, tracing_compiled
from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import (
    assemble,
    multiply_matrix,
    replace_attributes,
)
from lightning_gnnpipe.stages.content import (
    Watched,
    content_of,
    undone_on_errors,
    watching,
)
from lightning_gnnpipe.stages.find import (
    contains_passing,
    is_library,
    is_listed,
    listed_parts,
    run_listed,
)
from lightning_gnnpipe.stages.reads import Reads
from lightning_gnnpipe.stages.shapes import (
    UNKNOWN,
    Answer,
    Questions,
    Shaped,
    UnansweredError,
    is_of_shapes,
    mark,
)
from lightning_gnnpipe.user_code import line_here, untraceable, user_modules

_ROOT = "module"
_LINE = "line"
NUM_GRAPHS = "leaf_num_graphs"  # placeholder for the number of graphs, in a batch of graphs

_POOLS = (
    torch_geometric.nn.global_add_pool,
    torch_geometric.nn.global_max_pool,
    torch_geometric.nn.global_mean_pool,
)
_SEARCHED = (
    torch_geometric.nn,
    torch_geometric.nn.pool,
    torch_geometric.nn.pool.glob,
    torch_geometric.utils,
)
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")


def trace(
    module: nn.Module,
    call: Call,
    questions: Questions | None = None,
    *,
    is_grad_enabled: bool = True,
) -> tuple[fx.Graph, Reads]:
    """Return the graph of the method that is called, and what it reads beside its arguments.

    Placeholders `leaf_0`, `leaf_1`, ... are the leaves, `leaf_num_graphs` is the number of graphs.
    Targets begin with "module.". Values other than tensors are baked in. The forward is traced
    twice; traces that differ are refused. `is_grad_enabled`: autograd mode of the user's call.
    """
    random_numbers, name = _random_states(), _name_of(module, call)
    questions = questions or Questions()
    with (
        undone_on_errors(_attributes(module)) as undo,
        torch.set_grad_enabled(is_grad_enabled),
    ):
        graph, first = _trace_once(module, call, questions, undo)
        before = first.values()
        again, reads = _trace_once(module, call, questions, undo, is_second=True)
        if str(graph) != str(again):
            raise _refuse_chance(name, "two traces with different operations")
        if changed := first.changed(before, first.values()):
            raise _refuse_chance(name, f"a change of {', '.join(changed)}")
        if random_numbers != _random_states():
            raise _refuse_chance(name, "random numbers that are drawn while it is traced")
    constants = [n.target for n in again.nodes if n.op == "get_attr"]
    if any(not str(target).startswith(f"{_ROOT}.") for target in constants):
        raise UnsupportedError(
            expected=f"the {name} to create no tensors of its own",
            found="a tensor made from Python values or random numbers",
            remedy="Register it as a buffer in __init__, or derive it from an argument "
            "(x.new_zeros(...), torch.rand_like(x)).",
        )
    return again, reads


def _trace_once(
    module: nn.Module,
    call: Call,
    questions: Questions,
    undo: ExitStack,
    *,
    is_second: bool = False,
) -> tuple[fx.Graph, Reads]:
    caller, tracer = _Caller(module, call), _Tracer(module, questions)
    undo.callback(caller.watched.undo)
    try:
        with undone_on_errors(_attributes(module)) as attempt, traceable(module):
            attempt.callback(caller.watched.undo)
            graph = tracer.trace(caller)
    except UnsupportedError:
        raise
    except UnansweredError as asked:
        tracer.graph.output(())
        found = questions.learn(tracer.graph)
        questions.answers |= {str(asked): Answer(None, UNKNOWN)} | found
        return _trace_once(module, call, questions, undo, is_second=is_second)
    except Exception as error:
        raise untraceable(_name_of(module, call), error) from error
    for node in reversed(graph.nodes):  # questions keep no tensor alive
        if is_of_shapes(node) and not node.users:
            graph.erase_node(node)
    reads = Reads.of(module, call.method, caller.watched)
    kept = caller.watched.kept(with_values=is_second) or reads.kept()
    if kept:
        raise UnsupportedError(
            expected="forward to return what it computes",
            found=f"values kept on the module: {', '.join(kept)}",
            remedy="Return tensors, in a tuple or a dict, and use them in training_step. "
            "Count in hooks such as on_train_batch_start.",
        )
    return graph, reads


def _name_of(module: nn.Module, call: Call) -> str:
    return f"{call.method} of {type(module).__name__}"


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(m) for m in module.modules() if is_traced_through(m)]


def _refuse_chance(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        expected=f"the {name} to compute the same in every call",
        found=found,
        remedy="Draw random numbers with torch, in the shape of node-level tensors "
        "(torch.rand_like(x)). Change counters and schedules in hooks, not in forward.",
    )


def _random_states() -> Hashable:
    numbers = [random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()]
    return content_of(numbers)


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Let torch.fx trace factories, aggregations, DeepGCNLayer and compiled code in the block."""
    kind, thread = Aggregation, get_ident()
    original = kind.__call__

    def call(self: Aggregation, *args: Any, **kwargs: Any) -> Any:
        is_traced = get_ident() == thread
        return (nn.Module.__call__ if is_traced else original)(self, *args, **kwargs)

    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, DeepGCNLayer):  # its checkpoints read `requires_grad` of inputs
                stack.enter_context(replace_attributes(layer, {"ckpt_grad": False}))
        factories = {name: _accepts_proxies(getattr(torch, name)) for name in _FACTORIES}
        stack.enter_context(replace_attributes(torch, factories))
        stack.enter_context(tracing_compiled())
        stack.callback(setattr, kind, "__call__", original)
        kind.__call__ = call  # as plain modules: the original inspects values
        yield


def _accepts_proxies(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []

        def keep(value: Any) -> Any:
            if isinstance(value, fx.Proxy):
                found.append(value)
            return value

        fx.node.map_aggregate((args, kwargs), keep)
        if not found:
            return original(*args, **kwargs)
        return found[0].tracer.create_proxy("call_function", original, args, kwargs)

    return create


def is_traced_through(module: nn.Module) -> bool:
    """Whether the forward of `module` is traced; if not, the module is a leaf.

    Leaves: message-passing layers, modules without any, PyG's reversible blocks (inspect shapes).
    """
    is_called = isinstance(module, MessagePassing | InvertibleModule)
    return contains_passing(module) and not is_called


def root_of(module: nn.Module) -> nn.Module:
    """Return a module in which the targets of a traced graph can be looked up."""
    root = nn.Module()
    root.add_module(_ROOT, module)
    return root


def line_of_node(node: fx.Node) -> str:
    """Return the line of the user's code that made `node`; empty if unknown."""
    return str(node.meta.get(_LINE, ""))


def strip_root(target: str) -> str:
    """Return the name, in the user's module, of a traced module or parameter."""
    return target.removeprefix(_ROOT).removeprefix(".")


class _Caller(nn.Module):
    """Calls the user's module with its tensors as a flat list."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.add_module(_ROOT, module)
        self._call = call
        self.watched = Watched()

    def forward(self, *leaves: Any) -> Any:
        count = leaves[-1] if self._call.has_graphs else None
        module = getattr(self, _ROOT)
        with watching(self.watched):
            run = run_listed if is_listed(module) else Call.run
            return run(self._call, module, leaves, count)


class _Tracer(fx.Tracer):
    """Traces through modules that contain message passing; all other modules are leaves."""

    proxy_buffer_attributes = True  # each step recomputes values derived from buffers

    def __init__(self, module: nn.Module, questions: Questions) -> None:
        self._questions = questions
        functions = tuple(
            function
            for name in torch_geometric.utils.__all__
            if callable(function := getattr(torch_geometric.utils, name))
        )
        listed = listed_parts(module)
        self._listed = listed
        self._traced = {
            id(m) for m in module.modules() if is_traced_through(m) and id(m) not in listed
        }
        norm = torch_geometric.nn.conv.gcn_conv.gcn_norm
        super().__init__(autowrap_functions=(*functions, *_POOLS, norm))
        self._contexts = _contexts()
        passing = [m for m in module.modules() if contains_passing(m) or not is_library(m)]
        own = (sys.modules[type(m).__module__] for m in passing)
        search_in(self, {*_SEARCHED, *user_modules(), *own})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self._traced

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self._contexts and not _is_checkpointed():
            raise UnsupportedError(
                expected="forward to call all layers in one mode of autograd and of autocast",
                found="torch.no_grad(), torch.enable_grad() or torch.autocast(...) in it",
                remedy="Instead of no_grad(), call detach() on results or "
                "requires_grad_(False) on layers. Move code in another precision into a "
                "submodule without message passing.",
            )
        target = multiply_matrix if target is _spmm else target
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta[_LINE] = line_here()
        mark(node)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Shaped(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.ask(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        if not is_of_shapes(obj.node):
            return super().iter(obj)
        return iter([cast(Any, obj)[i] for i in range(len(self.answer(obj.node).value))])

    def answer(self, node: fx.Node) -> Answer:
        """Return the answer to `node`, which depends on shapes only."""
        if node.name not in self._questions.answers:
            raise UnansweredError(node.name)
        return self._questions.answers[node.name]

    def ask(self, proxy: fx.Proxy) -> Any:
        """Return the value of `proxy`; refuse values of tensors, and numbers of rows of batches."""
        found = self.answer(proxy.node) if is_of_shapes(proxy.node) else None
        has_graphs = cast(_Caller, self.root)._call.has_graphs
        if found is None or not found.is_known or (found.is_of_rows and has_graphs):
            raise fx.proxy.TraceError("control flow")
        self._questions.is_of_rows |= found.is_of_rows
        return found.value

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, torch.Tensor) and not isinstance(attr_val, nn.Parameter):
            for name, tensor in self.root.named_parameters():  # plain ones in functional_call
                if tensor is attr_val:
                    return self.create_proxy("get_attr", name, (), {})
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        takes_matrix = any(map(_is_of_matrix, (*args, *kwargs.values())))
        if takes_matrix and not is_library(m) and not isinstance(m, MessagePassing):
            self._traced |= {id(m)} - self._listed  # it may multiply the matrix several times
        result = super().call_module(m, forward, args, kwargs)
        types = _node_types(m)
        if len(types) == 1 and len(args) + len(kwargs) == 2:  # a dict, so that items() works
            return {types[0]: result[types[0]]}
        return result

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        call = cast(_Caller, self.root)._call
        leaves = [
            self.create_proxy("placeholder", f"leaf_{i}", (), {}) for i in range(len(call.leaves))
        ]
        if call.has_graphs:
            leaves.append(self.create_proxy("placeholder", NUM_GRAPHS, (), {}))
        return type(self.root).forward, [self.root, *leaves]


def _is_of_matrix(value: Any) -> bool:
    """Whether `value` stands for a sparse matrix, or its transpose."""
    node = value.node if isinstance(value, fx.Proxy) else value
    if not isinstance(node, fx.Node):
        return False
    is_transpose = node.op == "call_method" and node.target in ("t", "coalesce")
    return node.target is assemble or (is_transpose and _is_of_matrix(node.args[0]))


def _contexts() -> tuple[bool, ...]:
    """Return the modes of autograd and autocast, which fx does not record."""
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), *autocast


def _is_checkpointed() -> bool:
    """Whether an activation checkpoint is running, which disables gradients temporarily."""
    frame = currentframe()
    while frame is not None and frame.f_globals.get("__name__") != checkpoint.__module__:
        frame = frame.f_back
    return frame is not None


def _node_types(m: nn.Module) -> list[str]:
    """Return the output keys of a layer for heterogeneous graphs; empty for other modules."""
    if isinstance(m, HANConv):
        return list(m.metadata[0])
    return list(m.node_types) if isinstance(m, HGTConv) else []

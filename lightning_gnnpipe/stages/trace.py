"""Traces the user's forward with torch.fx, down to the message-passing layers."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from keyword import iskeyword
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
import torch_geometric.nn.conv.gcn_conv
import torch_geometric.nn.pool.glob
import torch_geometric.utils
from torch import fx, nn
from torch.utils.checkpoint import CheckpointFunction
from torch_geometric.data import Data
from torch_geometric.nn import (
    Aggregation,
    DeepGCNLayer,
    MessagePassing,
    RGCNConv,
)

from lightning_gnnpipe._compat_pyg import method_of
from lightning_gnnpipe._compat_torch import search_in, tracing_compiled
from lightning_gnnpipe.calls import Call, DataView
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import is_matrix, replace_attributes
from lightning_gnnpipe.stages.attributes import (
    Snapshot,
    holds_proxy,
    own_random_states,
    random_states,
    refusing_progress,
    restore_buffers,
    restored_on_errors,
    undisturbed,
)
from lightning_gnnpipe.stages.find import (
    Pipelined,
    calls_passing,
    contains_passing,
    is_library,
    is_listed,
    is_traced_through,
    listed_parts,
    run_listed,
)
from lightning_gnnpipe.stages.shapes import ANSWER, LINE, Shaped, is_of_shapes
from lightning_gnnpipe.stages.values import SampleRun, is_product, is_transpose
from lightning_gnnpipe.user_code import at, line_here, untraceable, user_modules

_RANDOM = re.compile("dropout|bernoulli|rand|normal(?!i[sz])|uniform|multinomial|poisson|sampling")
ROOT = "module"
NUM_GRAPHS = "leaf_num_graphs"  # placeholder for the number of graphs, in a batch of graphs

_nn, _utils = torch_geometric.nn, torch_geometric.utils
_POOLS = (_nn.global_add_pool, _nn.global_max_pool, _nn.global_mean_pool)
_SEARCHED = (_nn, _nn.pool, _nn.pool.glob, _utils)


@contextmanager
def _keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Refuse a trace that assigns to a buffer, such as a count of steps, and restore it."""
    held = [(one, *item) for one in module.modules() for item in one.named_buffers(recurse=False)]
    try:
        yield
    finally:
        kept = [one for one in held if isinstance(getattr(one[0], one[1]), fx.Proxy)]
        for owner, name, buffer in kept:
            setattr(owner, name, buffer)
        if kept:
            raise _refuse_kept(name for _, name, _ in kept)


def _refuse_kept(names: Iterable[str]) -> UnsupportedError:
    return UnsupportedError(
        expected="forward to return what it computes",
        found=f"values kept on the module: {', '.join(names)}",
        remedy="Return tensors, in a tuple or a dict, and use them in training_step. "
        "Count in hooks such as on_train_batch_start.",
    )


def trace(
    module: nn.Module,
    call: Call,
    run: SampleRun,
    *,
    is_grad_enabled: bool = True,
) -> fx.Graph:
    """Return the graph of the method that is called.

    Placeholders `leaf_0`, `leaf_1`, ... are the leaves, `leaf_num_graphs` is the number of graphs.
    Targets begin with "module.". Values other than tensors are baked in: see `Guard`. `run` has
    values of all nodes.
    `is_grad_enabled`: autograd mode of the user's call.
    """
    numbers = random_states(), own_random_states(module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with (
        ExitStack() as stack,
        refusing_progress(module, lambda: run.is_running),
        torch.set_grad_enabled(is_grad_enabled),
        restored_on_errors(module) as before,
        _keeping_buffers(module),
    ):
        stack.callback(restore_buffers, module, buffers)
        graph = _trace_once(module, call, run)
        for node in graph.nodes:
            path = str(node.target).split(".") if node.op in ("call_module", "get_attr") else ()
            if any(map(iskeyword, path)):  # torch.fx writes Python: self.layers.in
                raise UnsupportedError(
                    expected="names of submodules and weights that Python allows in code",
                    found=f"'{strip_root(str(node.target))}', which holds a keyword",
                    remedy="Rename it: 'in' to 'in_', for instance.",
                )
        changed = before.changed()
        if changed and not holds_proxy(changed):  # it may compute them once
            first = Snapshot(module)
            graph = _trace_once(module, call, run)
            changed = first.changed()
        if changed:
            raise _refuse_kept(changed)
        if numbers != (random_states(), own_random_states(module)):
            raise UnsupportedError(
                expected=f"the {_name_of(module, call)} to compute the same in every call",
                found="random numbers that are drawn while it is traced",
                remedy="Draw random numbers with torch, in the shape of node-level tensors "
                "(torch.rand_like(x)).",
            )
    return graph


def _trace_once(module: nn.Module, call: Call, run: SampleRun) -> fx.Graph:
    caller, tracer = Caller(module, call), Tracer(module, call, run)
    run.begin(caller)
    try:
        with restored_on_errors(module), traceable(module):
            graph = tracer.trace(caller)
            tracer.use_leaves()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if isinstance(error, UnsupportedError) or tracer.refusal is not None:
            raise (tracer.refusal or error) from None
        raise untraceable(_name_of(module, call), error) from None  # torch.fx's words
    if tracer.refusal is not None:  # forward has caught it
        raise tracer.refusal
    run.check_writes()
    for node in reversed(graph.nodes):  # questions keep no tensor alive
        if is_of_shapes(node) and not node.users:
            graph.erase_node(node)
    return graph


def _name_of(module: nn.Module, call: Call) -> str:
    return f"{call.method} of {type(module).__name__}"


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Let torch.fx trace aggregations, DeepGCNLayer and compiled code in the block."""
    kind, original = Aggregation, Aggregation.__call__

    def call(self: Aggregation, *args: Any, **kwargs: Any) -> Any:
        is_traced = _has_proxies((*args, *kwargs.values()))
        return (nn.Module.__call__ if is_traced else original)(self, *args, **kwargs)

    with ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, DeepGCNLayer):  # its checkpoints read `requires_grad` of inputs
                stack.enter_context(replace_attributes(layer, {"ckpt_grad": False}))
        stack.enter_context(tracing_compiled())
        stack.callback(setattr, kind, "__call__", original)
        kind.__call__ = call  # as plain modules: the original inspects values
        stack.enter_context(_tracing_functions())
        yield


@contextmanager
def _tracing_functions() -> Iterator[None]:
    """Trace through activation checkpoints, and refuse other autograd functions, by their names."""
    base: Any = torch.autograd.Function.__mro__[1]  # reached by `round = Straight.apply` as well

    def apply(kind: type, *args: Any) -> Any:
        if not _has_proxies(args):
            return cast(Any, super(base, kind)).apply(*args)
        if kind is CheckpointFunction:
            return args[0](*args[2:])
        raise UnsupportedError(
            f"forward calls the autograd function {kind.__name__}, whose backward a trace does not "
            "see. Call it in the forward of a submodule without message passing, such as:\n"
            f"    class Apply(nn.Module):\n        def forward(self, x):\n"
            f"            return {kind.__name__}.apply(x)"
        )

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


def _has_proxies(values: Iterable[Any]) -> bool:
    return any(isinstance(one, fx.Proxy) for one in values)


class Caller(nn.Module):
    """Calls the user's module with its tensors as a flat list."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.add_module(ROOT, module)
        self._call = call

    def forward(self, *leaves: Any) -> Any:
        count = leaves[-1] if self._call.has_graphs else None
        module = getattr(self, ROOT)
        run = run_listed if is_listed(module) else Call.run
        return run(self._call, module, leaves, count)


class _Outline(fx.Tracer):
    """Traces through modules that contain message passing; all other modules are leaves."""

    def __init__(self, module: nn.Module) -> None:
        functions = filter(callable, (getattr(_utils, name) for name in _utils.__all__))
        listed = self._listed = listed_parts(module)
        self._traced = {
            id(m) for m in module.modules() if is_traced_through(m) and id(m) not in listed
        }
        super().__init__(autowrap_functions=(*functions, *_POOLS, _nn.conv.gcn_conv.gcn_norm))
        passing = [m for m in module.modules() if contains_passing(m) or not is_library(m)]
        own = (sys.modules.get(type(m).__module__) for m in passing)
        search_in(self, {*_SEARCHED, *user_modules(), *filter(None, own)})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self._traced

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Have a placeholder for each argument without a default."""
        _, *given = inspect.signature(root_fn).parameters.values()
        names = [one.name for one in given if one.default is one.empty and one.kind < 2]
        return root_fn, [self.root, *(self.create_proxy("placeholder", n, (), {}) for n in names)]


def most_layers(found: Pipelined) -> int | None:
    """Return a number of layers that a forward has at most; None if only its data would show it."""
    module: Any = found.module
    if is_listed(module):
        return len(list(module.pipeline_layers()))
    given = inspect.signature(getattr(module, found.method)).parameters.values()
    if any(one.default not in (None, one.empty) for one in given):
        return None  # a call may give another value
    tracer = _Outline(module)
    tracer.traced_func_name = found.method
    try:
        with undisturbed(module), traceable(module):
            calls = sum(calls_passing(node, module) for node in tracer.trace(module).nodes)
    except Exception:  # it asks for values of its arguments
        return None
    return max(calls, sum(isinstance(one, MessagePassing) for one in module.modules()))


class Tracer(_Outline):
    """Traces one call: values that forward asks for come from `run`."""

    proxy_buffer_attributes = True  # each step recomputes values derived from buffers

    def __init__(self, module: nn.Module, call: Call, run: SampleRun) -> None:
        self._call, self._run, self._asked = call, run, list[fx.Node]()
        self.refusal: UnsupportedError | None = None  # torch may replace it by an error of its own
        super().__init__(module)
        self._contexts = _contexts()

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self._contexts:
            raise UnsupportedError(
                expected="forward to call all layers in one mode of autograd and of autocast",
                found="torch.no_grad(), torch.enable_grad() or torch.autocast(...) in it",
                remedy="Instead of no_grad(), call detach() on results or "
                "requires_grad_(False) on layers. Move code in another precision into a "
                "submodule without message passing.",
            )
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta[LINE] = line_here()
        if not {*node.all_input_nodes}.isdisjoint(self._asked):  # torch.zeros((x.size(0), 8))
            self.refusal = None
        try:
            self._run.run(node)
        except UnsupportedError as error:
            self.refusal = error
            raise
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Shaped(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.ask(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        if not is_of_shapes(obj.node):
            return super().iter(obj)
        return iter([cast(Any, obj)[i] for i in range(len(obj.node.meta[ANSWER].value))])

    def ask(self, proxy: fx.Proxy) -> Any:
        """Return the value of `proxy`; refuse values of tensors, and numbers of rows."""
        found = proxy.node.meta.get(ANSWER)
        if found is None:
            raise fx.proxy.TraceError("control flow")
        if found.is_of_rows:
            self._asked.append(proxy.node)
            self.refusal = UnsupportedError(
                "Forward uses a number of nodes or edges as a Python number, as torch.zeros(n, 8) "
                f"and range(n) do{at(line_here())}.\nEach chunk has other numbers than the graph.\n"
                "Make tensors by x.new_zeros(x.size(0), 8) or torch.zeros((x.size(0), 8)), and "
                "decide on sizes in training_step."
            )
            raise self.refusal
        return found.value

    def create_arg(self, a: Any) -> Any:
        is_constant = isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter)
        if isinstance(a, np.generic):
            a = a.item()
        if (is_constant or is_matrix(a)) and not any(a is one for one in self.root.buffers()):
            raise _refuse_constant(self.root, a)
        return super().create_arg(a)

    def use_leaves(self) -> None:
        """Read parameters and buffers that are leaves of the call as such, as their rows.

        One that only multiplies rows, as in `x @ self.weight`, is whole in each chunk.
        """
        slots = {id(self._call.leaves[slot]): slot for slot in self._call.held}
        leaves = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in [node for node in self.graph.nodes if node.op == "get_attr" and slots]:
            slot = slots.get(id(attrgetter(str(node.target))(self.root)))
            if slot is None or _is_matrix_of_weights(node):
                continue
            rows = leaves[slot]
            if slot in self._call.weights:  # its rows flow from the stage that reads them first
                with self.graph.inserting_before(node):
                    rows = self.graph.call_function(torch.positive, (rows,))
            node.replace_all_uses_with(rows)
            self.graph.erase_node(node)
        if slots:
            self._run.again(self.graph)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._run.is_running:
            return attr_val
        if isinstance(attr_val, torch.Tensor) and not isinstance(attr_val, nn.Parameter):
            for name, tensor in self.root.named_parameters():  # plain ones in functional_call
                if tensor is attr_val:
                    return self.create_proxy("get_attr", name, (), {})
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self._run.is_running:
            return forward(*args, **kwargs)
        if isinstance(m, RGCNConv) and args and args[0] is None:
            raise UnsupportedError(
                f"An RGCNConv has no features (None){at(line_here())}.\nChunks need the numbers of "
                "their nodes.\nPass torch.arange(num_nodes) to forward, and to the layer, as x."
            )
        given = (*args, *kwargs.values())
        takes_parts = any(isinstance(one, DataView) for one in given)
        if takes_parts and not is_library(m) and not isinstance(m, MessagePassing):
            self._traced |= {id(m)} - self._listed  # it takes tensors out of the graph
        return super().call_module(m, forward, args, kwargs)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        names = [f"leaf_{i}" for i in range(len(self._call.leaves))]
        names += [NUM_GRAPHS] if self._call.has_graphs else []
        given = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return method_of(self.root, "forward"), [self.root, *given]


def is_named_random(node: fx.Node, root: nn.Module | None = None) -> bool:
    """Whether the name of `node` suggests random numbers; modules are looked up in `root`."""
    if node.op == "call_module" and root is not None:
        layers = root.get_submodule(str(node.target)).modules()
        return any("drop" in type(layer).__name__.lower() for layer in layers)
    is_function = node.op in ("call_function", "call_method")
    return is_function and _RANDOM.search(str(node.target).lower()) is not None


def _refuse_constant(root: nn.Module, value: Any) -> UnsupportedError:
    """Return the error for a tensor that forward reads, and that is none of the call or module."""
    found = next((name for name, one in _plain_tensors(root) if one is value), None)
    what = "a tensor that is no argument" if found is None else f"'self.{found}', no argument"
    name = "tensor" if found is None else found.rpartition(".")[2]
    return UnsupportedError(
        f"Forward reads {what}, parameter or buffer of its module{at(line_here())}.\n"
        f"Pass it as an argument of forward, or write self.register_buffer('{name}', {name}) in "
        "__init__.\n"
        "Make new tensors of arguments: x.new_zeros(x.size(0), 8), torch.rand_like(x)."
    )


def _plain_tensors(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of modules, and of graphs that they hold, by name."""
    for prefix, one in root.named_modules():
        for key, value in vars(one).items():
            name = f"{strip_root(prefix)}.{key}".removeprefix(".")
            yield name, value
            if isinstance(value, Data):
                yield from ((f"{name}.{inner}", item) for inner, item in value)


def _is_matrix_of_weights(node: fx.Node) -> bool:
    """Whether all users of a tensor multiply by it from the right, maybe transposed."""
    return bool(node.users) and all(
        _is_matrix_of_weights(user) if is_transpose(user) else is_product(user, node)
        for user in node.users
    )


def _contexts() -> tuple[bool, ...]:
    """Return the modes of autograd and autocast, which fx does not record."""
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), *autocast


def root_of(module: nn.Module) -> nn.Module:
    """Return a module in which the targets of a traced graph can be looked up."""
    root = nn.Module()
    root.add_module(ROOT, module)
    return root


def strip_root(target: str) -> str:
    """Return the name, in the user's module, of a traced module or parameter."""
    return target.removeprefix(ROOT).removeprefix(".")

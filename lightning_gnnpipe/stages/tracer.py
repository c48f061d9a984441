"""The fx tracer: records what forward does with its tensors, down to the message-passing layers."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, cast

import torch
import torch_geometric.nn.conv.gcn_conv
import torch_geometric.nn.pool.glob
import torch_geometric.utils
from torch import fx, nn
from torch_geometric.data import Data
from torch_geometric.nn import HANConv, HGTConv, MessagePassing, RGCNConv
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from lightning_gnnpipe._compat_torch import search_in
from lightning_gnnpipe.calls import Call, DataView
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import is_matrix
from lightning_gnnpipe.stages.find import (
    contains_passing,
    is_library,
    is_listed,
    listed_parts,
    run_listed,
)
from lightning_gnnpipe.stages.shapes import (
    Answer,
    Questions,
    Shaped,
    UnansweredError,
    is_of_shapes,
    mark,
)
from lightning_gnnpipe.user_code import at, line_here, user_modules

_INPLACE_FUNCTIONS = {operator.iadd, operator.imul, operator.isub, operator.itruediv}
_RANDOM = re.compile("dropout|bernoulli|rand|normal(?!i[sz])|uniform|multinomial|poisson|sampling")
ROOT = "module"
_LINE = "line"
_PRODUCTS = {"matmul", "mm", "linear", "embedding"}
_TRANSPOSES = {"t", "transpose"}
NUM_GRAPHS = "leaf_num_graphs"  # placeholder for the number of graphs, in a batch of graphs

_nn, _utils = torch_geometric.nn, torch_geometric.utils
_POOLS = (_nn.global_add_pool, _nn.global_max_pool, _nn.global_mean_pool)
_SEARCHED = (_nn, _nn.pool, _nn.pool.glob, _utils)


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


class Tracer(fx.Tracer):
    """Traces through modules that contain message passing; all other modules are leaves."""

    proxy_buffer_attributes = True  # each step recomputes values derived from buffers

    def __init__(self, module: nn.Module, questions: Questions, call: Call) -> None:
        self._questions, self._call = questions, call
        self.refusal: UnsupportedError | None = None  # torch may replace it by an error of its own
        functions = filter(callable, (getattr(_utils, name) for name in _utils.__all__))
        listed = self._listed = listed_parts(module)
        self._traced = {
            id(m) for m in module.modules() if is_traced_through(m) and id(m) not in listed
        }
        super().__init__(autowrap_functions=(*functions, *_POOLS, _nn.conv.gcn_conv.gcn_norm))
        self._contexts = _contexts()
        passing = [m for m in module.modules() if contains_passing(m) or not is_library(m)]
        own = (sys.modules[type(m).__module__] for m in passing)
        search_in(self, {*_SEARCHED, *user_modules(), *own})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self._traced

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
        """Return the value of `proxy`; refuse values of tensors, and numbers of rows."""
        found = self.answer(proxy.node) if is_of_shapes(proxy.node) else None
        if found is None:
            raise fx.proxy.TraceError("control flow")
        if found.is_of_rows:
            self.refusal = UnsupportedError(
                f"Forward uses a number of nodes or edges as a Python number{at(line_here())}.\n"
                "Each chunk has other numbers than the graph.\n"
                "Make tensors by x.new_zeros(x.size(0), 8) or torch.ones_like(x), and "
                "decide on sizes in training_step."
            )
            raise self.refusal
        return found.value

    def create_arg(self, a: Any) -> Any:
        is_constant = isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter)
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
                mark(rows)
            node.replace_all_uses_with(rows)
            self.graph.erase_node(node)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, torch.Tensor) and not isinstance(attr_val, nn.Parameter):
            for name, tensor in self.root.named_parameters():  # plain ones in functional_call
                if tensor is attr_val:
                    return self.create_proxy("get_attr", name, (), {})
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if isinstance(m, RGCNConv) and args and args[0] is None:
            raise UnsupportedError(
                f"An RGCNConv has no features (None){at(line_here())}.\nChunks need the numbers of "
                "their nodes.\nPass torch.arange(num_nodes) to forward, and to the layer, as x."
            )
        given = (*args, *kwargs.values())
        takes_parts = any(isinstance(one, DataView) for one in given)
        if takes_parts and not is_library(m) and not isinstance(m, MessagePassing):
            self._traced |= {id(m)} - self._listed  # it takes tensors out of the graph
        result = super().call_module(m, forward, args, kwargs)
        # The output keys of a layer for heterogeneous graphs.
        types = list(m.node_types) if isinstance(m, HGTConv) else []
        types = list(m.metadata[0]) if isinstance(m, HANConv) else types
        if len(types) == 1 and len(args) + len(kwargs) == 2:  # a dict, so that items() works
            return {types[0]: result[types[0]]}
        return result

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        names = [f"leaf_{i}" for i in range(len(self._call.leaves))]
        names += [NUM_GRAPHS] if self._call.has_graphs else []
        given = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return type(self.root).forward, [self.root, *given]


def is_named_write(node: fx.Node) -> bool:
    """Whether the name of a function or method suggests that it overwrites its operand."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return (
        node.kwargs.get("inplace") is True
        or node.target in _INPLACE_FUNCTIONS
        or (name.endswith("_") and not name.endswith("__"))
    )


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
    return UnsupportedError(
        f"Forward reads {what}, parameter or buffer of its module{at(line_here())}.\n"
        "Pass it as an argument of forward, or write self.register_buffer('edge_index', "
        "edge_index) in __init__.\n"
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
        _is_matrix_of_weights(user)
        if getattr(user.target, "__name__", user.target) in _TRANSPOSES
        else user.args[1:2] == (node,)
        and getattr(user.target, "__name__", user.target) in _PRODUCTS
        for user in node.users
    )


def _contexts() -> tuple[bool, ...]:
    """Return the modes of autograd and autocast, which fx does not record."""
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), *autocast


def is_traced_through(module: nn.Module) -> bool:
    """Whether the forward of `module` is traced; if not, the module is a leaf.

    Leaves: message-passing layers, modules without any, PyG's reversible blocks (inspect shapes).
    """
    is_called = isinstance(module, MessagePassing | InvertibleModule)
    return contains_passing(module) and not is_called


def owners_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose parameters and buffers forward itself may read, with their names."""
    tables = (nn.Embedding, nn.ParameterList, nn.ParameterDict)
    for name, one in module.named_modules():
        if is_traced_through(one) or isinstance(one, tables):
            yield name, one


def root_of(module: nn.Module) -> nn.Module:
    """Return a module in which the targets of a traced graph can be looked up."""
    root = nn.Module()
    root.add_module(ROOT, module)
    return root


def line_of_node(node: fx.Node) -> str:
    """Return the line of the user's code that made `node`; empty if unknown."""
    return str(node.meta.get(_LINE, ""))


def strip_root(target: str) -> str:
    """Return the name, in the user's module, of a traced module or parameter."""
    return target.removeprefix(ROOT).removeprefix(".")

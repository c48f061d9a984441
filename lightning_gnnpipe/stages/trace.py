"""Tracing of the user's forward by torch.fx.

Message-passing layers and all modules that hold none are leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch_geometric.nn.conv.gcn_conv
import torch_geometric.nn.pool.glob
import torch_geometric.utils
from torch import fx, nn
from torch_geometric.nn import HANConv, HGTConv, MessagePassing
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from lightning_gnnpipe._compat_torch import search_in
from lightning_gnnpipe.errors import UnsupportedError, explain, first_line
from lightning_gnnpipe.stages.call import Call
from lightning_gnnpipe.stages.listed import is_listed, listed_parts, run_listed
from lightning_gnnpipe.stages.traceable import traceable
from lightning_gnnpipe.user_code import at, line_here, line_of

_ROOT = "module"
_LINE = "line"
NUM_GRAPHS = "leaf_num_graphs"
"""Placeholder for the number of graphs, in a batch of graphs."""

_POOLS = (
    torch_geometric.nn.global_add_pool,
    torch_geometric.nn.global_max_pool,
    torch_geometric.nn.global_mean_pool,
)
_POOL_MODULES = (torch_geometric.nn, torch_geometric.nn.pool, torch_geometric.nn.pool.glob)
_PLAIN = bool | int | float | str


_REMEDY = (
    "Write it without control flow on the values or shapes of tensors and without calls of "
    "self.log, move such code into training_step or into a submodule without message passing, "
    "name a smaller module by GNNPipeStrategy(pipelined_module=...), or list its layers in a "
    "method 'pipeline_layers' (README, limits)."
)
_REMEDIES = {
    "item assignment": "Instead of h[mask] = new, write h = torch.where(mask.unsqueeze(-1), new, "
    "h), which makes a new tensor.",
    "the graph has no": "Other attributes do not reach the pipelined module: pass 'edge_index' "
    "rather than a sparse matrix, and use lists and objects in training_step.",
}


# What torch.fx says, and what the user's line does.
_FAULTS = {
    "item assignment": "an assignment to some rows of a tensor",
    "control flow": "a decision on the values of a tensor (if, while, assert, bool)",
    "cannot be iterated": "a loop over a tensor",
    "'len' is not supported": "len() of a tensor, where x.size(0) is supported",
}


def _words(error: Exception) -> str:
    for text, words in _FAULTS.items():
        if text in str(error):
            return words
    text = first_line(error).replace("'Proxy' object", "a tensor of the trace")
    return f"{type(error).__name__}: {text.replace('Proxy', 'a tensor of the trace')}"


def trace(module: nn.Module, call: Call) -> fx.Graph:
    """Return the graph of `module.forward` for the tensors of `call`.

    Placeholders `leaf_0`, `leaf_1`, ... stand for the leaves, `leaf_num_graphs` for the number of
    graphs; modules are named below `module`.
    What depends on `self.training` or on options that are not tensors is baked in.

    Raises:
        UnsupportedError: If the forward cannot be traced; says why and what to do.
    """
    graph, again = _trace_once(module, call), _trace_once(module, call)
    if str(graph) != str(again):
        raise UnsupportedError(
            explain(
                expected=f"the forward of {type(module).__name__} to do the same each time",
                found="a second trace that differs from the first",
                remedy="Draw random numbers by torch, shaped like a node's rows "
                "(torch.rand_like(x)); change counters and schedules in hooks, not in forward.",
            )
        )
    constants = [n.target for n in graph.nodes if n.op == "get_attr"]
    if any(not str(target).startswith(f"{_ROOT}.") for target in constants):
        raise UnsupportedError(
            explain(
                expected=f"the forward of {type(module).__name__} to create no tensors of its own",
                found="a tensor made from Python values or random numbers",
                remedy="Register it as a buffer in __init__, or derive it from an argument "
                "(x.new_zeros(...), torch.rand_like(x)).",
            )
        )
    return graph


def _trace_once(module: nn.Module, call: Call) -> fx.Graph:
    before = _kept_tensors(module)
    try:
        with traceable(module):
            graph = _Tracer(module).trace(_Caller(module, call))
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            explain(
                expected=f"the forward of {type(module).__name__} to be traceable by torch.fx",
                found=f"{_words(error)}{at(line_of(error))}",
                remedy=next((r for text, r in _REMEDIES.items() if text in str(error)), _REMEDY),
            )
        ) from error
    finally:
        changed = _restore(module, before)
    if changed:
        raise UnsupportedError(
            explain(
                expected="forward to return what it computes",
                found=f"values kept on the module: {', '.join(changed)}",
                remedy="Return tensors, in a tuple or a dict, and use them in training_step; count "
                "in hooks such as on_train_batch_start.",
            )
        )
    return graph


def _kept_tensors(module: nn.Module) -> dict[tuple[nn.Module, str], object]:
    """Return what the modules that are traced through keep in plain attributes."""
    return {
        (m, name): value
        for m in module.modules()
        if _is_traced_through(m)
        for name, value in vars(m).items()
        if not name.startswith("_")
    }


def _restore(module: nn.Module, before: dict[tuple[nn.Module, str], object]) -> list[str]:
    """Undo what a trace did to plain attributes and return their names."""
    changed = []
    for (m, name), value in _kept_tensors(module).items():
        if value is before.get((m, name), m):
            continue
        changed.append(name)
        if (m, name) in before:
            vars(m)[name] = before[m, name]
        else:
            del vars(m)[name]
    return changed


def traced_options(module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what a trace bakes in: plain attributes, and which tensors are attributes."""
    listed = listed_parts(module)
    for name, m in module.named_modules():
        if id(m) in listed or not _is_traced_through(m):
            continue
        for attribute, value in (
            *vars(m).items(),
            *m.named_buffers(recurse=False, remove_duplicate=False),
        ):
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", id(value)
            elif not attribute.startswith("_") and isinstance(value, _PLAIN | None):
                yield f"{name}.{attribute}", value


def contains_passing(module: nn.Module) -> bool:
    """Whether `module` is or holds a message-passing layer."""
    return any(isinstance(m, MessagePassing) for m in module.modules())


def _is_traced_through(module: nn.Module) -> bool:
    """Whether the forward of `module` is traced.

    Others are called as they are, on real tensors: message-passing layers, what holds none, PyG's
    reversible blocks, which look at the shapes of their arguments.
    """
    is_called = isinstance(module, MessagePassing | InvertibleModule)
    return contains_passing(module) and not is_called


def root_of(module: nn.Module) -> nn.Module:
    """Return a module that the targets of a traced graph can be looked up in."""
    root = nn.Module()
    root.add_module(_ROOT, module)
    return root


def line_of_node(node: fx.Node) -> str:
    """Return the user's line that a node was traced from; empty if there is none."""
    return str(node.meta.get(_LINE, ""))


def strip_root(target: str) -> str:
    """Return the name of a traced module or parameter in the user's module."""
    return target.removeprefix(_ROOT).removeprefix(".")


class _Caller(nn.Module):
    """Calls the user's module with its tensors in a flat list."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.add_module(_ROOT, module)
        self._call = call

    def forward(self, *leaves: Any) -> Any:
        count = leaves[-1] if self._call.has_graphs else None
        args, kwargs = self._call.rebuild(leaves, count)
        module = getattr(self, _ROOT)
        if is_listed(module):
            return run_listed(module, args, kwargs)
        return module.forward(*args, **kwargs)


class _Tracer(fx.Tracer):
    """Traces through modules that contain message passing and stops at all others."""

    proxy_buffer_attributes = True  # what is computed of buffers is computed anew in each step

    def __init__(self, module: nn.Module) -> None:
        functions = tuple(
            function
            for name in torch_geometric.utils.__all__
            if callable(function := getattr(torch_geometric.utils, name))
        )
        self._listed = listed_parts(module)
        norm = torch_geometric.nn.conv.gcn_conv.gcn_norm
        super().__init__(autowrap_functions=(*functions, *_POOLS, norm))
        passing = [m for m in module.modules() if contains_passing(m)]
        search_in(self, {*_POOL_MODULES, *(sys.modules[type(m).__module__] for m in passing)})

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta[_LINE] = line_here()
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._listed or not _is_traced_through(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        result = super().call_module(m, forward, args, kwargs)
        types = _node_types(m)
        if len(types) == 1 and len(args) + len(kwargs) == 2:  # it returns a dict, for items() too
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


def _node_types(m: nn.Module) -> list[str]:
    """Return the keys of what a layer for heterogeneous graphs returns."""
    if isinstance(m, HANConv):
        return list(m.metadata[0])
    return list(m.node_types) if isinstance(m, HGTConv) else []

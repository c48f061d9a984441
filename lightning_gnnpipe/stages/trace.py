"""Traces the user's forward with torch.fx, down to the message-passing layers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import currentframe
from typing import Any, cast

import numpy as np
import torch
import torch_geometric.nn.conv.gcn_conv
import torch_geometric.nn.pool.glob
import torch_geometric.utils
from torch import fx, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import HANConv, HGTConv, MessagePassing
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from lightning_gnnpipe._compat_torch import search_in
from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.errors import UnsupportedError, explain, first_line
from lightning_gnnpipe.stages.content import Watched, content_of, watching
from lightning_gnnpipe.stages.find import is_listed, listed_parts, run_listed
from lightning_gnnpipe.stages.reads import Reads
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


# Error texts of torch.fx, and descriptions of the user's line.
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


def trace(module: nn.Module, call: Call, *, is_grad_enabled: bool = True) -> tuple[fx.Graph, Reads]:
    """Return the graph of `module.forward` for the tensors of `call`, and what else it reads.

    Placeholders `leaf_0`, `leaf_1`, ... are the leaves, `leaf_num_graphs` is the number of graphs.
    Targets begin with "module.". Values other than tensors are baked in. The forward is traced
    twice; traces that differ are refused. `is_grad_enabled`: autograd mode of the user's call.
    """
    random_numbers = _random_states()
    with _undone_on_errors(module) as undo, torch.set_grad_enabled(is_grad_enabled):
        graph, first = _trace_once(module, call, undo)
        before = first.values()
        again, reads = _trace_once(module, call, undo, is_second=True)
        if str(graph) != str(again):
            raise _refuse_chance(module, "a second trace that differs from the first")
        if changed := first.changed(before, first.values()):
            raise _refuse_chance(module, f"a change of {', '.join(changed)}")
        if random_numbers != _random_states():
            raise _refuse_chance(module, "random numbers that are no row of a node")
    constants = [n.target for n in again.nodes if n.op == "get_attr"]
    if any(not str(target).startswith(f"{_ROOT}.") for target in constants):
        raise UnsupportedError(
            explain(
                expected=f"the forward of {type(module).__name__} to create no tensors of its own",
                found="a tensor made from Python values or random numbers",
                remedy="Register it as a buffer in __init__, or derive it from an argument "
                "(x.new_zeros(...), torch.rand_like(x)).",
            )
        )
    return again, reads


def _trace_once(
    module: nn.Module, call: Call, undo: ExitStack, *, is_second: bool = False
) -> tuple[fx.Graph, Reads]:
    caller = _Caller(module, call)
    undo.callback(caller.watched.undo)
    try:
        with traceable(module):
            graph = _Tracer(module).trace(caller)
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
    reads = Reads.of(module, caller.watched)
    kept = caller.watched.kept(with_values=is_second) or reads.kept()
    if kept:
        raise UnsupportedError(
            explain(
                expected="forward to return what it computes",
                found=f"values kept on the module: {', '.join(kept)}",
                remedy="Return tensors, in a tuple or a dict, and use them in training_step; count "
                "in hooks such as on_train_batch_start.",
            )
        )
    return graph, reads


def _refuse_chance(module: nn.Module, found: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            expected=f"the forward of {type(module).__name__} to do the same each time",
            found=found,
            remedy="Draw random numbers by torch, shaped like a node's rows "
            "(torch.rand_like(x)); change counters and schedules in hooks, not in forward.",
        )
    )


def _random_states() -> Hashable:
    numbers = [random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()]
    return content_of(numbers)


@contextmanager
def _undone_on_errors(module: nn.Module) -> Iterator[ExitStack]:
    """If the block fails, restore containers of traced modules and call the yielded stack."""
    attributes = [vars(m) for m in module.modules() if is_traced_through(m)]
    held = [*(one for named in attributes for one in named.values()), *attributes]
    with ExitStack() as undo:
        for one in held:
            if isinstance(one, list | dict | set):
                undo.callback(_refill, one, one.copy())
        yield undo
        undo.pop_all()


def _refill(container: Any, items: Any) -> None:
    container.clear()
    add = container.extend if isinstance(container, list) else container.update
    add(items)


def contains_passing(module: nn.Module) -> bool:
    """Whether `module` is or holds a message-passing layer."""
    return any(isinstance(m, MessagePassing) for m in module.modules())


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
        args, kwargs = self._call.rebuild(leaves, count)
        module = getattr(self, _ROOT)
        with watching(self.watched):
            if is_listed(module):
                return run_listed(module, args, kwargs)
            return module.forward(*args, **kwargs)


class _Tracer(fx.Tracer):
    """Traces through modules that contain message passing; all other modules are leaves."""

    proxy_buffer_attributes = True  # each step recomputes values derived from buffers

    def __init__(self, module: nn.Module) -> None:
        functions = tuple(
            function
            for name in torch_geometric.utils.__all__
            if callable(function := getattr(torch_geometric.utils, name))
        )
        listed = listed_parts(module)
        self._traced = {
            id(m) for m in module.modules() if is_traced_through(m) and id(m) not in listed
        }
        norm = torch_geometric.nn.conv.gcn_conv.gcn_norm
        super().__init__(autowrap_functions=(*functions, *_POOLS, norm))
        self._contexts = _contexts()
        passing = [m for m in module.modules() if contains_passing(m)]
        search_in(self, {*_POOL_MODULES, *(sys.modules[type(m).__module__] for m in passing)})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) not in self._traced

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _contexts() != self._contexts and not _is_checkpointed():
            raise UnsupportedError(
                explain(
                    expected="forward to call its layers in one mode of autograd and of autocast",
                    found="torch.no_grad(), torch.enable_grad() or torch.autocast(...) in it",
                    remedy="Call detach() on results, and requires_grad_(False) on layers, instead "
                    "of no_grad(); do what needs another precision in a submodule without message "
                    "passing.",
                )
            )
        node = super().create_node(*args, **kwargs)
        node.meta[_LINE] = line_here()
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, torch.Tensor) and not isinstance(attr_val, nn.Parameter):
            for name, tensor in self.root.named_parameters():  # plain ones in functional_call
                if tensor is attr_val:
                    return self.create_proxy("get_attr", name, (), {})
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
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

"""Traces the user's forward with torch.fx, down to the message-passing layers."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointFunction
from torch_geometric.nn import Aggregation, DeepGCNLayer

from lightning_gnnpipe._compat_torch import tracing_compiled
from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import replace_attributes
from lightning_gnnpipe.stages.attributes import (
    Snapshot,
    holds_proxy,
    refusing_progress,
    restored_on_errors,
)
from lightning_gnnpipe.stages.shapes import (
    UNKNOWN,
    Answer,
    Questions,
    UnansweredError,
    is_of_shapes,
)
from lightning_gnnpipe.stages.tracer import Caller, Tracer
from lightning_gnnpipe.user_code import untraceable


def trace(
    module: nn.Module,
    call: Call,
    questions: Questions | None = None,
    *,
    is_grad_enabled: bool = True,
) -> fx.Graph:
    """Return the graph of the method that is called.

    Placeholders `leaf_0`, `leaf_1`, ... are the leaves, `leaf_num_graphs` is the number of graphs.
    Targets begin with "module.". Values other than tensors are baked in: see `Guard`.
    `is_grad_enabled`: autograd mode of the user's call.
    """
    numbers, questions = random_states(), questions or Questions()
    with (
        refusing_progress(module),
        torch.set_grad_enabled(is_grad_enabled),
        restored_on_errors(module) as before,
    ):
        graph = _trace_once(module, call, questions)
        changed = before.changed()
        if changed and not holds_proxy(changed):  # it may compute them once
            first = Snapshot(module)
            graph = _trace_once(module, call, questions)
            changed = first.changed()
        if changed:
            raise UnsupportedError(
                expected="forward to return what it computes",
                found=f"values kept on the module: {', '.join(changed)}",
                remedy="Return tensors, in a tuple or a dict, and use them in training_step. "
                "Count in hooks such as on_train_batch_start.",
            )
        if numbers != random_states():
            raise UnsupportedError(
                expected=f"the {_name_of(module, call)} to compute the same in every call",
                found="random numbers that are drawn while it is traced",
                remedy="Draw random numbers with torch, in the shape of node-level tensors "
                "(torch.rand_like(x)).",
            )
    return graph


def _trace_once(module: nn.Module, call: Call, questions: Questions) -> fx.Graph:
    caller, tracer = Caller(module, call), Tracer(module, questions, call)
    try:
        with restored_on_errors(module), traceable(module):
            graph = tracer.trace(caller)
    except UnansweredError as asked:
        tracer.graph.output(())
        tracer.use_leaves()
        found = questions.learn(tracer.graph, caller)
        questions.answers |= {str(asked): Answer(None, UNKNOWN)} | found
        return _trace_once(module, call, questions)
    except Exception as error:
        if isinstance(error, UnsupportedError) or tracer.refusal is not None:
            raise (tracer.refusal or error) from None
        raise untraceable(_name_of(module, call), error) from None  # torch.fx's words
    tracer.use_leaves()
    for node in reversed(graph.nodes):  # questions keep no tensor alive
        if is_of_shapes(node) and not node.users:
            graph.erase_node(node)
    return graph


def _name_of(module: nn.Module, call: Call) -> str:
    return f"{call.method} of {type(module).__name__}"


def random_states() -> Hashable:
    """Return the states of Python's, NumPy's and torch's random numbers."""
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Let torch.fx trace aggregations, DeepGCNLayer and compiled code in the block."""
    kind, thread = Aggregation, get_ident()
    original = kind.__call__

    def call(self: Aggregation, *args: Any, **kwargs: Any) -> Any:
        is_traced = get_ident() == thread
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
    function, thread = torch.autograd.Function, get_ident()
    own = vars(function)["apply"]

    def apply(kind: type, *args: Any) -> Any:
        has_proxies = any(isinstance(one, fx.Proxy) for one in args)
        if get_ident() != thread or not has_proxies:
            return own.__get__(None, kind)(*args)
        if kind is CheckpointFunction:
            return args[0](*args[2:])
        raise UnsupportedError(
            f"forward calls the autograd function {kind.__name__}, whose backward a trace does not "
            "see. Call it in the forward of a submodule without message passing, such as:\n"
            f"    class Apply(nn.Module):\n        def forward(self, x):\n"
            f"            return {kind.__name__}.apply(x)"
        )

    function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        function.apply = own  # type: ignore[method-assign]

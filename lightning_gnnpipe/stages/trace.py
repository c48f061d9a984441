"""Traces the user's forward with torch.fx, down to the message-passing layers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch_geometric.nn import Aggregation, DeepGCNLayer

from lightning_gnnpipe._compat_torch import tracing_compiled
from lightning_gnnpipe.calls import Call
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import replace_attributes
from lightning_gnnpipe.stages.content import content_of, undone_on_errors
from lightning_gnnpipe.stages.reads import Reads
from lightning_gnnpipe.stages.shapes import (
    UNKNOWN,
    Answer,
    Questions,
    UnansweredError,
    is_of_shapes,
)
from lightning_gnnpipe.stages.tracer import Caller, Tracer, is_traced_through
from lightning_gnnpipe.user_code import untraceable, user_modules

_FACTS = ("device", "dtype")
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
    twice; traces that differ are refused.
    `is_grad_enabled`: autograd mode of the user's call.
    """
    random_numbers, name = random_states(), _name_of(module, call)
    questions = questions or Questions()
    with undone_on_errors(_attributes(module)) as undo, torch.set_grad_enabled(is_grad_enabled):
        graph, first = _trace_once(module, call, questions, undo)
        before = first.values()
        again, reads = _trace_once(module, call, questions, undo, is_second=True)
        if str(graph) != str(again):
            raise _refuse_chance(name, "two traces with different operations")
        if changed := first.changed(before, first.values()):
            raise _refuse_chance(name, f"a change of {', '.join(changed)}")
        if random_numbers != random_states():
            raise _refuse_chance(name, "random numbers that are drawn while it is traced")
    return again, reads


def _trace_once(
    module: nn.Module, call: Call, questions: Questions, undo: ExitStack, *, is_second: bool = False
) -> tuple[fx.Graph, Reads]:
    caller, tracer = Caller(module, call), Tracer(module, questions, call)
    undo.callback(caller.watched.undo)
    try:
        with undone_on_errors(_attributes(module)) as attempt, traceable(module):
            attempt.callback(caller.watched.undo)
            graph = tracer.trace(caller)
    except UnsupportedError:
        raise
    except UnansweredError as asked:
        tracer.graph.output(())
        tracer.use_leaves()
        found = questions.learn(tracer.graph, caller)
        questions.answers |= {str(asked): Answer(None, UNKNOWN)} | found
        return _trace_once(module, call, questions, undo, is_second=is_second)
    except Exception as error:
        raise untraceable(_name_of(module, call), error) from None  # torch.fx's words
    tracer.use_leaves()
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


def random_states() -> Hashable:
    """Return a fingerprint of the states of Python's, NumPy's and torch's random numbers."""
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
        traced = [sys.modules[type(m).__module__] for m in module.modules() if is_traced_through(m)]
        for space in {*user_modules(), *traced}:
            if "len" not in vars(space):
                vars(space)["len"] = _length
                stack.callback(vars(space).pop, "len")
        stack.enter_context(tracing_compiled())
        stack.callback(setattr, kind, "__call__", original)
        kind.__call__ = call  # as plain modules: the original inspects values
        yield


def _length(value: Any) -> Any:
    """`len`, of a tensor in a trace as well: Python's own has to return a number at once."""
    is_tensor = isinstance(value, fx.Proxy) and not is_of_shapes(value.node)
    return value.size(0) if is_tensor else len(value)


def _accepts_proxies(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []

        def keep(value: Any) -> Any:
            if isinstance(value, fx.Proxy):
                found.append(value)
            return value

        fx.node.map_aggregate((args, kwargs), keep)
        facts = {n: v for n in _FACTS if isinstance(v := kwargs.get(n), fx.Proxy)}
        if len(facts) < len(found):
            return found[0].tracer.create_proxy("call_function", original, args, kwargs)
        tracer: Any = found[0].tracer if found else None
        return original(*args, **kwargs | {name: tracer.ask(v) for name, v in facts.items()})

    return create

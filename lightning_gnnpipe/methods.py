"""Puts the pipeline behind methods of a module, and runs the user's own methods outside of it.

Errors of the user's own methods are raised unchanged.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe.calls import Call, ChangedGraph, Inputs, classify
from lightning_gnnpipe.errors import Fallbacks, GNNPipeError
from lightning_gnnpipe.graph import tensors_in
from lightning_gnnpipe.stages import Sample, draw_sample, undisturbed

log = logging.getLogger(__name__)

Run = Callable[[Sequence[Any], Mapping[str, Any], str], Any]


class PipelinedMethods:
    """Runs one method of a module in the pipeline: the first of `names` that training calls.

    The rest run as they are written, and what they call of the pipelined one is pipelined. `name`
    is that of the pipelined one: before training has called any, the first name. Where
    `is_pipelined` says no, all run as they are written.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        is_pipelined: Callable[[], bool],
        *,
        is_quiet: bool = False,
    ) -> None:
        self.module, self.name = module, names[0]
        self._names, self._is_pipelined = names, is_pipelined
        self._is_known, self._num_runs = len(names) == 1, 0
        self._fallbacks = Fallbacks(log, is_quiet=is_quiet)

    def attach(self, run: Run) -> None:
        """Replace the methods; `run` gets arguments and the name of the pipelined one."""
        self._run = run
        for name in self._names:
            vars(self.module)[name] = _Method(self, name)

    def detach(self) -> None:
        """Restore the module's own methods."""
        for name in self._names:
            vars(self.module).pop(name, None)

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of the method `name`."""
        if not self._is_pipelined():
            return self.own(name)(*args, **kwargs)
        has_tensors = next(tensors_in([*args, kwargs]), None) is not None
        if not self._is_known and has_tensors and torch.is_grad_enabled():
            self.name, self._is_known = name, True
        if name == self.name:
            self._num_runs += 1
            return _with_changes(self._run(args, kwargs, name), args, kwargs)
        num_runs = self._num_runs
        result = self.own(name)(*args, **kwargs)
        if has_tensors and self._num_runs == num_runs:
            self._fallbacks.tell(
                f"'{name}' is called beside '{self.name}', the pipelined method",
                origin="pipelined layers",
                to="the whole graph on every device in this call",
            )
        return result

    def own(self, name: str) -> MethodType:
        """Return the module's own method."""
        return MethodType(getattr(type(self.module), name), self.module)


def _with_changes(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return `result` with the caller's own graphs, changed, in place of `ChangedGraph`."""
    if isinstance(result, ChangedGraph):
        key = result.argument
        graph = kwargs[key] if isinstance(key, str) else args[key]
        for name, value in result.attributes.items():
            setattr(graph, name, value)
        return graph
    if type(result) in (list, tuple):
        return type(result)(_with_changes(one, args, kwargs) for one in result)
    return result


class _Method:
    """Takes the place of a method; copies of the module get the module's own method."""

    def __init__(self, methods: PipelinedMethods, name: str) -> None:
        self._methods, self._name = methods, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._methods.call(self._name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = self._methods.own(self._name)
        return MethodType(own.__func__, memo.get(id(own.__self__), own.__self__))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._methods.module, self._name)  # on loading, the class's own


@contextmanager
def own_methods(module: nn.Module) -> Iterator[None]:
    """Let `module` run its own methods within the block."""
    attached = {name: one for name, one in vars(module).items() if isinstance(one, _Method)}
    for name in attached:
        del vars(module)[name]
    try:
        yield
    finally:
        vars(module).update(attached)


@contextmanager
def raising_own_errors(module: nn.Module, call: Call, inputs: Inputs) -> Iterator[None]:
    """If the block fails and `module` fails plainly as well, raise the error of `module`.

    It must fail on a sample and on the whole batch: its weights may need all rows.
    """
    own: Exception | None = None
    try:
        yield
    except Exception:
        on_sample = _error_of(
            lambda: _run_on_sample(module, call, draw_sample(module, call, inputs))
        )
        own = on_sample and _error_of(lambda: _run(module, call.method, *call.arguments))
        if own is None:
            raise
    if own is not None:
        raise own from None


@contextmanager
def raising_wrong_arguments(
    module: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """If the block fails and the arguments do not fit `method`, raise Python's own error."""
    try:
        yield
    except GNNPipeError:
        with own_methods(module):
            try:
                inspect.signature(getattr(module, method)).bind(*args, **kwargs)
            except TypeError:
                error = _error_of(lambda: _run(module, method, args, kwargs))
                if error is not None:
                    raise error from None
        raise


def is_one_graph(module: nn.Module, call: Call) -> bool:
    """Whether `call`, with a batch vector of zeros, is one graph: outputs have one row per node."""
    single = replace(call, is_one_graph=True)
    try:
        sample = draw_sample(module, single, classify(single))
        outputs = flatten(_run_on_sample(module, single, sample))
    except Exception:  # it fails again later, where the error is shown
        return False
    rows = [output.size(0) if output.dim() else -1 for output in outputs]
    return bool(rows) and set(rows) == {sample.num_nodes}


def flatten(output: object) -> list[Tensor]:
    """Return the tensors of a module's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in flatten(item)]
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in flatten(item)]
    return []


def _error_of(run: Callable[[], Any]) -> Exception | None:
    try:
        run()
    except torch.OutOfMemoryError:  # the whole graph may not fit one device
        return None
    except Exception as error:
        return error
    return None


def _run_on_sample(module: nn.Module, call: Call, sample: Sample) -> Any:
    count = None if sample.graphs is None else sample.graphs.num_graphs
    return _run(module, call.method, *call.rebuild(sample.leaves, count))


def _run(module: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with own_methods(module), undisturbed(module):
        return getattr(module, method)(*args, **kwargs)

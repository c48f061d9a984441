"""Puts the pipeline behind a method of a module, and runs the user's own methods outside of it.

Errors of the user's own methods are raised unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch_geometric.nn import MessagePassing, Sequential

from lightning_gnnpipe._compat_pyg import method_of
from lightning_gnnpipe._compat_torch import pytree
from lightning_gnnpipe.calls import Call, ChangedGraph, Inputs, classify
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.stages import Sample, draw_sample, undisturbed

Run = Callable[[Sequence[Any], Mapping[str, Any], str], Any]


class PipelinedMethod:
    """Runs the method `name` of a module in the pipeline; counts its calls.

    Where `is_pipelined` says no, it runs as it is written.
    """

    def __init__(self, module: nn.Module, name: str, is_pipelined: Callable[[], bool]) -> None:
        self.module, self.name, self.num_calls = module, name, 0
        self._is_pipelined = is_pipelined
        self._hooks = list[RemovableHandle]()  # of `watched`

    def attach(self, run: Run) -> None:
        """Replace the method by `run`, which gets its arguments and its name."""
        before = vars(self.module).get(self.name)
        if before is not None and not isinstance(self.module, Sequential):
            raise UnsupportedError(
                f"'{self.name}' is set on an instance of {type(self.module).__name__}, whose class "
                "is traced.\nWrite it in the class, or in a subclass."
            )
        self._run = run
        vars(self.module)[self.name] = _Method(self, before)

    def detach(self) -> None:
        """Restore the module's own method."""
        found = vars(self.module).pop(self.name, None)
        if isinstance(found, _Method) and found.before is not None:
            vars(self.module)[self.name] = found.before

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of the method."""
        self.num_calls += 1
        if self._hooks:
            self._end_watch()
        if not self._is_pipelined():
            return self.own()(*args, **kwargs)
        return _with_changes(self._run(args, kwargs, self.name), args, kwargs)

    @contextmanager
    def watched(self, root: nn.Module) -> Iterator[list[nn.Module]]:
        """Yield a list of trained message-passing layers of `root` that run before the method."""
        found = list[nn.Module]()

        def note(layer: nn.Module, _: Any) -> None:
            trained = [one.requires_grad for one in layer.parameters()] or [True]
            if torch.is_grad_enabled() and any(trained):
                found.append(layer)

        layers = [one for one in root.modules() if isinstance(one, MessagePassing)]
        self._hooks = [one.register_forward_pre_hook(note) for one in layers]
        try:
            yield found
        finally:
            self._end_watch()

    def _end_watch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def own(self) -> MethodType:
        """Return the module's own method."""
        return MethodType(method_of(self.module, self.name), self.module)


def _with_changes(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return `result` with the caller's own graphs, changed, in place of `ChangedGraph`."""

    def put(one: ChangedGraph) -> Any:
        graph = kwargs[one.argument] if isinstance(one.argument, str) else args[one.argument]
        for name, value in one.attributes.items():
            setattr(graph, name, value)
        return graph

    return pytree.tree_map_only(
        ChangedGraph, put, result, lambda one: isinstance(one, ChangedGraph)
    )


class _Method:
    """Takes the place of a method; copies of the module get the module's own method."""

    def __init__(self, method: PipelinedMethod, before: MethodType | None) -> None:
        self._method, self.before = method, before
        self.__func__ = None if before is None else before.__func__  # see `method_of`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method.call(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = self._method.own()
        return MethodType(own.__func__, memo.get(id(own.__self__), own.__self__))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._method.module, self._method.name)  # on loading, the class's own


@contextmanager
def own_methods(module: nn.Module) -> Iterator[None]:
    """Let `module` run its own methods within the block."""
    attached = {name: one for name, one in vars(module).items() if isinstance(one, _Method)}
    for name, one in attached.items():
        del vars(module)[name]
        if one.before is not None:
            vars(module)[name] = one.before
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
    return [one for one in pytree.tree_leaves(output) if isinstance(one, Tensor)]


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

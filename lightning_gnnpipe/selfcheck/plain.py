"""Runs the user's own forward outside of the pipeline; its errors are raised unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_gnnpipe.calls import Call, Inputs, classify
from lightning_gnnpipe.errors import GNNPipeError, UnsupportedError
from lightning_gnnpipe.selfcheck.trial import flatten
from lightning_gnnpipe.stages import Sample, draw_sample, undisturbed
from lightning_gnnpipe.user_code import mark_own


@contextmanager
def switched(module: nn.Module, training: bool, but: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Set the mode of `module`, except of layers in `but`; restore every mode on exit."""
    flags = [(m, m.training) for m in module.modules()]
    kept = [(m, m.training) for m in but]
    module.train(training)
    for m, flag in kept:
        m.training = flag
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


class PipelinedForward:
    """Replaces a module's forward by `run`; copies of the module get the module's own forward."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Sequence[Any], Mapping[str, Any]], Any],
        has_all_weights: Callable[[], bool],
    ) -> None:
        self._module, self._run, self._has_all_weights = module, run, has_all_weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._check_copy()
        return MethodType(type(self._module).forward, memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_copy()
        return getattr, (self._module, "forward")  # on loading, the class's own

    def _check_copy(self) -> None:
        if self._has_all_weights():
            return
        raise UnsupportedError(
            expected="a copy of the pipelined module while each rank has all of its weights",
            found=f"a copy or pickle of a {type(self._module).__name__} while each rank has "
            "only the weights of its own stage",
            remedy="Copy it before training begins, in __init__ or in on_fit_start, or use one "
            "stage. To average weights, use Lightning's WeightAveraging.",
        )


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """Let `module` run its own forward within the block."""
    attached = module.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if attached is not None:
            module.__dict__["forward"] = attached


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
        own = on_sample and _error_of(lambda: _run(module, *call.arguments))
        if own is None:
            raise
    if own is not None:
        mark_own(own)
        raise own from None


@contextmanager
def raising_wrong_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """If the block fails and the arguments do not fit forward, raise Python's own error."""
    try:
        yield
    except GNNPipeError:
        with own_forward(module):
            try:
                inspect.signature(module.forward).bind(*args, **kwargs)
            except TypeError:
                error = _error_of(lambda: _run(module, args, kwargs))
                if error is not None:
                    mark_own(error)
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
    return _run(module, *call.rebuild(sample.leaves, count))


def _run(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with own_forward(module), undisturbed(module):
        return module.forward(*args, **kwargs)

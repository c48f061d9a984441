"""Runs the user's own forward plainly, outside of the pipeline.

What fails there is the user's own error and is raised as it is. A refusal would say that the module
does not fit a pipeline, which would mislead.
"""

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
from lightning_gnnpipe.errors import GNNPipeError, UnsupportedError, explain
from lightning_gnnpipe.selfcheck.trial import flatten
from lightning_gnnpipe.stages import Sample, draw_sample, undisturbed
from lightning_gnnpipe.user_code import mark_own


@contextmanager
def switched(module: nn.Module, training: bool, but: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put `module` into training or evaluation mode for the block, then as each part of it was.

    The layers in `but` stay as they are.
    """
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
    """Takes the place of a module's forward; copies of the module get the module's own.

    Args:
        module: The module.
        run: Is given the arguments instead.
        has_all_weights: Returns whether all of the module's weights are on this rank.
    """

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
        return getattr, (self._module, "forward")  # of the loaded module, which has none yet

    def _check_copy(self) -> None:
        """Refuse a copy that would lack weights.

        Raises:
            UnsupportedError: If it would.
        """
        if self._has_all_weights():
            return
        raise UnsupportedError(
            explain(
                expected="a copy of the pipelined module to be made where all of its weights are",
                found=f"a copy, or a pickle, of a {type(self._module).__name__} of which each rank "
                "has the weights of its own stage",
                remedy="Copy it before training begins, in __init__ or in on_fit_start; average "
                "weights by Lightning's WeightAveraging; or use one stage.",
            )
        )


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    """Have `module` run its own forward within the block."""
    attached = module.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if attached is not None:
            module.__dict__["forward"] = attached


@contextmanager
def raising_own_errors(module: nn.Module, call: Call, inputs: Inputs) -> Iterator[None]:
    """Raise the error of `module` itself, if it has one, for what fails within the block.

    The module runs on a small part of the batch; where it fails there, on the batch as well, which
    has the rows that its weights may be made for.

    Args:
        module: The pipelined module, with all of its parameters.
        call: Its arguments.
        inputs: What they are.
    """
    own: Exception | None = None
    try:
        yield
    except Exception:
        own = _error_on_sample(module, call, inputs) and _error_of(module, *call.arguments)
        if own is None:
            raise
    if own is not None:
        mark_own(own)
        raise own from None


@contextmanager
def raising_wrong_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Raise Python's own error, if `forward` has other parameters, for what fails in the block."""
    try:
        yield
    except GNNPipeError:
        with own_forward(module):
            try:
                inspect.signature(module.forward).bind(*args, **kwargs)
            except TypeError:
                error = _error_of(module, args, kwargs)
                if error is not None:
                    mark_own(error)
                    raise error from None
        raise


def is_one_graph(module: nn.Module, call: Call) -> bool:
    """Whether `call`, with a batch vector of zeros, is one of a single graph to cut into chunks.

    It is where outputs have one row a node, as on a small part of the graph.
    """
    single = replace(call, is_one_graph=True)
    try:
        sample = draw_sample(module, single, classify(single))
        outputs = flatten(_run_on_sample(module, single, sample))
    except Exception:  # it fails again where the error is shown
        return False
    rows = [output.size(0) if output.dim() else -1 for output in outputs]
    return bool(rows) and set(rows) == {sample.num_nodes}


def _error_on_sample(module: nn.Module, call: Call, inputs: Inputs) -> Exception | None:
    try:
        _run_on_sample(module, call, draw_sample(module, call, inputs))
    except Exception as error:
        return error
    return None


def _error_of(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Exception | None:
    try:
        with own_forward(module), undisturbed(module):
            module.forward(*args, **kwargs)
    except torch.OutOfMemoryError:  # says nothing of a pipeline
        return None
    except Exception as error:
        return error
    return None


def _run_on_sample(module: nn.Module, call: Call, sample: Sample) -> Any:
    count = None if sample.graphs is None else sample.graphs.num_graphs
    args, kwargs = call.rebuild(sample.leaves, count)
    with own_forward(module), undisturbed(module):
        return module.forward(*args, **kwargs)

"""Putting a module into another state for a while: another mode, another forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from lightning_gnnpipe.errors import UnsupportedError, explain


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

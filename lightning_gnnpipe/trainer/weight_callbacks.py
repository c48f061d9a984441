"""Lets callbacks that need all weights, like SWA, run on a split model, and finds ends of hooks.

Each function here that patches something returns its undo function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from lightning_gnnpipe.passing import replace_attributes
from lightning_gnnpipe.steps import PipelinedModel, StageWeights
from lightning_gnnpipe.trainer import _compat

_LIGHTNING = ("lightning.", "pytorch_lightning.")
_NOT_USERS = (*_LIGHTNING, "lightning_gnnpipe.")


def serve_callbacks(
    callbacks: Iterable[Callback],
    model: PipelinedModel,
    prefix: str,
    is_interrupted: Callable[[], bool],
) -> Callable[[], None]:
    """Patch `callbacks`, which are set up already, before the layers are assigned.

    While `is_interrupted()`, other ranks may not answer.
    """
    patched = ExitStack()

    def patch(owner: Any, name: str, value: Any) -> None:
        patched.enter_context(replace_attributes(owner, {name: value}))

    for callback in callbacks:
        average = _compat.average_of(callback)
        if average is not None:
            weights = model.add_copy(average.get_submodule(prefix))
            patch(average, "state_dict", _full_state(average, model, weights, is_interrupted))
            for name in (name for name in dir(callback) if name.startswith("on_")):
                hook = getattr(callback, name)
                if hook.__module__.startswith(_LIGHTNING):
                    patch(callback, name, within(model.reads.inside, hook))
        if isinstance(callback, BaseFinetuning):
            finetune = callback.finetune_function
            patch(callback, "finetune_function", within(model.whole, finetune))
    return patched.close


def _full_state(
    average: nn.Module,
    model: PipelinedModel,
    weights: StageWeights,
    is_interrupted: Callable[[], bool],
) -> Callable[..., dict[str, Any]]:
    """Return a `state_dict` of `average` with the weights of all stages."""
    local_state_dict = average.state_dict

    def state_dict(*args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = local_state_dict(*args, prefix=prefix, **kwargs)
        if not is_interrupted():
            model.complete(state, average, prefix, weights)
        return state

    return state_dict


def within(
    context: Callable[[], AbstractContextManager[None]], hook: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `hook`, which runs within a new `context`."""

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return hook(*args, **kwargs)

    return run


def at_ends_of_hooks(
    trainer: pl.Trainer, run: Callable[[str], Any]
) -> AbstractContextManager[None]:
    """Call `run` with the hook's name at the end of each user hook that succeeds.

    Lightning profiles every hook, under a name that shows its owner.
    """
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    profile, is_users = profiler.profile, dict[str, bool]()

    @contextmanager
    def watched(name: str) -> Iterator[Any]:
        if name not in is_users:
            is_users[name] = _is_users(trainer, name)
        with profile(name) as found:
            yield found
        if is_users[name]:
            run(name)

    return replace_attributes(profiler, {"profile": watched})


def owners_of_hooks(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the user's module and callbacks by their names in Lightning's profiles."""
    owners: dict[str, Any] = {
        f"[Callback]{one.state_key}": one
        for one in trainer.callbacks  # type: ignore[attr-defined]
    }
    module = trainer.lightning_module
    return owners | {f"[LightningModule]{type(module).__name__}": module}


def _is_users(trainer: pl.Trainer, name: str) -> bool:
    """Whether the profiled action `name` is a hook that the user has written."""
    owners = owners_of_hooks(trainer)
    owner, _, hook = name.rpartition(".")
    if owner not in owners or not hook.startswith(("on_", "configure_")):
        return False
    method = getattr(owners[owner], hook, None)
    return not str(getattr(method, "__module__", "")).startswith(_NOT_USERS)

"""Lets callbacks that need all weights, like SWA, run on a split model, and finds ends of hooks.

Ranks answer reads of weights at the end of each user hook. Lightning profiles every hook, under a
name that shows its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from lightning_gnnpipe.steps import PipelinedModel, StageWeights
from lightning_gnnpipe.trainer import _compat


class GuestCallbacks:
    """The callbacks of a run that need the weights of all stages."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def attach(
        self,
        callbacks: Iterable[Callback],
        model: PipelinedModel,
        prefix: str,
        is_interrupted: Callable[[], bool],
    ) -> None:
        """Patch `callbacks`, which are set up already, before the layers are assigned.

        `prefix`: name of the pipelined module in the LightningModule. `is_interrupted`: whether an
        error
        may keep other ranks from answering.
        """
        for callback in callbacks:
            average = _compat.average_of(callback)
            if average is not None:
                self._serve_average(average, model, prefix, is_interrupted)
                self._let_read(callback, model)
            if isinstance(callback, BaseFinetuning):
                self._serve_finetuning(callback, model)

    def detach(self) -> None:
        """Restore the callbacks."""
        while self._undo:
            self._undo.pop()()

    def _serve_average(
        self,
        average: nn.Module,
        model: PipelinedModel,
        prefix: str,
        is_interrupted: Callable[[], bool],
    ) -> None:
        weights: StageWeights = model.add_copy(average.get_submodule(prefix))
        local_state_dict = average.state_dict

        def state_dict(*args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
            state: dict[str, Any] = local_state_dict(*args, prefix=prefix, **kwargs)
            if not is_interrupted():
                model.complete(state, average, prefix, weights)
            return state

        average.__dict__["state_dict"] = state_dict
        self._undo.append(lambda: average.__dict__.pop("state_dict", None))

    def _let_read(self, callback: Callback, model: PipelinedModel) -> None:
        """Let hooks of Lightning's own callback use this rank's own weights."""
        for name in (name for name in dir(callback) if name.startswith("on_")):
            hook = getattr(callback, name)
            if not hook.__module__.startswith(("lightning.", "pytorch_lightning.")):
                continue
            callback.__dict__[name] = _inside(model, hook)
            self._undo.append(partial(callback.__dict__.pop, name, None))

    def _serve_finetuning(self, callback: BaseFinetuning, model: PipelinedModel) -> None:
        finetune = callback.finetune_function

        def with_all_weights(*args: Any, **kwargs: Any) -> None:
            with model.whole():
                finetune(*args, **kwargs)

        callback.__dict__["finetune_function"] = with_all_weights
        self._undo.append(lambda: callback.__dict__.pop("finetune_function", None))


def _inside(model: PipelinedModel, hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with model.reads.inside():
            return hook(*args, **kwargs)

    return run


_OURS = ("lightning.", "pytorch_lightning.", "lightning_gnnpipe.")


class HookEnds:
    """Calls a function at the end of each hook that a user has written."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def attach(self, trainer: pl.Trainer, run: Callable[[str], Any]) -> None:
        """Call `run` with the hook's name at the end of each user hook that succeeds."""
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

        profiler.__dict__["profile"] = watched
        self._undo.append(lambda: profiler.__dict__.pop("profile", None))

    def detach(self) -> None:
        """Restore the profiler."""
        while self._undo:
            self._undo.pop()()


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
    return not str(getattr(method, "__module__", "")).startswith(_OURS)

"""Runs the user's training_step again within itself, from the same state.

Each run starts with the batch, random state and LightningModule state of the first one. Afterwards
the present state is restored. Log calls of repeated runs have no effect.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import tensors_in

Restore = Callable[[], None]

_MUTED = ("log", "log_dict", "print")


class StepReplay:
    """One training_step that can run again while it runs.

    Calls of `pipelined` return known outputs in the repeated run, and its state is left alone.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipelined: nn.Module,
        step: Callable[..., Any],
        args: Sequence[Any],
        device: torch.device,
    ) -> None:
        self._module, self._step, self._device = module, step, device
        self._args = [_shallow(one) for one in args]
        inner = set(pipelined.modules()) - {module} if pipelined is not module else set()
        self._modules = [one for one in module.modules() if one not in inner]
        self._tensors = [one for arg in args for one in tensors_in(arg)]
        self._begin = self._capture()

    def __call__(self) -> Tensor:
        """Return the loss as its backward starts: divided for accumulation, and scaled."""
        resume = self._capture()
        versions = [version_of(one) for one in self._tensors]
        self._begin()
        try:
            _mute(self._module, self._modules)
            output = self._step(*map(_shallow, self._args))
        finally:
            resume()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise _refuse("training_step to return a loss", f"{type(loss).__name__}")
        if versions != [version_of(one) for one in self._tensors]:
            raise _refuse("training_step not to change the batch in place", "a changed tensor")
        return self._scaled(loss)

    def _scaled(self, loss: Tensor) -> Tensor:
        trainer = self._module.trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        loss = loss / trainer.accumulate_grad_batches
        return loss if scaler is None else scaler.scale(loss)

    def _capture(self) -> Restore:
        """Return a function that restores the present random and module state."""
        streams = random_state(self._device)
        kept = [one for one in (_keep(vars(each)) for each in self._modules) if one is not None]

        def restore() -> None:
            set_random_state(streams, self._device)
            for one in kept:
                one()

        return restore


def check_replay(module: pl.LightningModule) -> None:
    """Refuse modules whose training_step cannot run again."""
    if not module.automatic_optimization:
        raise _refuse("automatic optimization", "automatic_optimization=False")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise _refuse("training_step to take a batch", "dataloader_iter")


def _keep(value: Any) -> Restore | None:
    """Return a function that restores a container, tensor or generator; None for other values."""
    if isinstance(value, Tensor):  # steps do not change weights
        is_fixed = isinstance(value, nn.Parameter) or value.is_inference()
        return None if is_fixed else _keep_tensor(value)
    if isinstance(value, MutableMapping):
        return _keep_all(value, dict(value), list(value.values()))
    if isinstance(value, list | deque | set):
        return _keep_all(value, list(value), list(value))
    if isinstance(value, torch.Generator):
        return cast(Restore, partial(value.set_state, value.get_state()))
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy())
    return None


def _keep_tensor(tensor: Tensor) -> Restore:
    saved = tensor.detach().clone()

    def restore() -> None:
        tensor.data.copy_(saved)  # invisible to autograd's version check

    return restore


def _keep_all(container: Any, items: Any, inner: Sequence[Any]) -> Restore:
    """Return a function that refills `container` with `items` and restores `inner`."""
    kept = [one for one in map(_keep, inner) if one is not None]
    fill = container.extend if hasattr(container, "extend") else container.update

    def restore() -> None:
        container.clear()
        fill(items)
        for one in kept:
            one()

    return restore


def _shallow(value: Any) -> Any:
    """Return `value` with copied containers and the same tensors."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_shallow, value))
    if isinstance(value, list):
        return [_shallow(one) for one in value]
    if isinstance(value, dict):
        return {name: _shallow(one) for name, one in value.items()}
    return value if isinstance(value, Tensor) else copy.copy(value)


def _mute(module: pl.LightningModule, modules: Iterable[nn.Module]) -> None:
    """Make `module` log nothing and metrics compute locally, until the state is restored.

    Collective calls raise: other ranks may run the step a different number of times.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _refuse("no collective call in training_step", "self.all_gather")

    vars(module).update(dict.fromkeys(_MUTED, lambda *args, **kwargs: None), all_gather=refuse)
    for metric in (one for one in modules if isinstance(one, Metric)):
        metric.distributed_available_fn = lambda: False


def _refuse(expected: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        expected=f"{expected}, since training_step runs again for each micro-batch",
        found=found,
        remedy="Use schedule='fill_drain', which runs it once.",
    )


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all random streams, including a GPU `device`."""
    algorithm, keys, position, has_gauss, cached = cast(Any, np.random.get_state())
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(algorithm), torch.from_numpy(keys.astype("int64")), position, has_gauss),
        "numpy_gauss": float(cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    algorithm, keys, position, has_gauss = state["numpy"]
    keys = keys.numpy().astype("uint32")
    np.random.set_state((algorithm, keys, position, has_gauss, state["numpy_gauss"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

"""Hooks of torch on the layers and weights of a pipelined module.

Layers run once for each chunk, on the rank of their stage, and on a small sample before training: a
hook would see other things than in one whole pass. Hooks on the module itself see all rows, on
every rank, once a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from lightning_gnnpipe._compat_pyg import passing_hooks
from lightning_gnnpipe._compat_torch import global_hooks, hooks_of_module, hooks_of_parameter
from lightning_gnnpipe.errors import UnsupportedError, explain

# Theirs prepare weights, or write down names and times.
_LIBRARIES = ("torch.", "torch_geometric.", "lightning.", "pytorch_lightning.")


def check_hooks(module: nn.Module, *, is_whole: bool, runs_again: bool) -> None:
    """Refuse hooks that a pipeline would call otherwise than one whole pass.

    Args:
        module: The pipelined module.
        is_whole: Whether this process runs all layers, and on the whole graph at once.
        runs_again: Whether training_step calls the module several times.

    Raises:
        UnsupportedError: With the place of the hook.
    """
    place = next(_hooked_modules(module, runs_again), None)
    if place is not None:
        raise UnsupportedError(
            explain(
                expected="no hooks on layers of the pipelined module, which run once for each "
                "chunk",
                found=place,
                remedy="Return what the hook looks at from the forward of the pipelined module, or "
                "put the hook on that module itself: there it gets all rows (with "
                "schedule='fill_drain').",
            )
        )
    if is_whole:
        return
    for name, parameter in module.named_parameters():
        if any(hooks_of_parameter(parameter)):
            raise UnsupportedError(
                explain(
                    expected="no hooks on weights of the pipelined module, whose gradients come "
                    "chunk by chunk",
                    found=f"one on '{name}'",
                    remedy="Read or change the gradients in on_after_backward or "
                    "on_before_optimizer_step, where p.grad is whole; "
                    "gradient_clip_algorithm='value' clips each number.",
                )
            )


def _hooked_modules(module: nn.Module, runs_again: bool) -> Iterator[str]:
    for name, one in module.named_modules():
        if one is module and not runs_again:
            continue
        if any(map(_is_users, (*hooks_of_module(one), *passing_hooks(one)))):
            yield f"one on '{name}', a {type(one).__name__}"
    if any(map(_is_users, global_hooks())):
        yield "one on all modules"


def _is_users(hook: Any) -> bool:
    """Whether `hook` is the user's own."""
    while isinstance(hook, partial):
        hook = hook.func
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{origin}.".startswith(_LIBRARIES)

"""The ends of the hooks that users write, where ranks answer those that read weights.

Lightning profiles each hook that it calls; its name tells whose hook it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl

_OURS = ("lightning.", "pytorch_lightning.", "lightning_gnnpipe.")


class HookEnds:
    """Runs something at the end of each hook that a user has written."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def attach(self, trainer: pl.Trainer, run: Callable[[str], Any]) -> None:
        """Call `run` with the name of each such hook at its end, on this rank.

        Args:
            trainer: Set up already.
            run: It is not called where a hook fails.
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

        profiler.__dict__["profile"] = watched
        self._undo.append(lambda: profiler.__dict__.pop("profile", None))

    def detach(self) -> None:
        """Give the profiler back as it was."""
        while self._undo:
            self._undo.pop()()


def owners_of_hooks(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the user's module and the callbacks, by the names that Lightning profiles them by."""
    owners: dict[str, Any] = {
        f"[Callback]{one.state_key}": one
        for one in trainer.callbacks  # type: ignore[attr-defined]
    }
    module = trainer.lightning_module
    return owners | {f"[LightningModule]{type(module).__name__}": module}


def _is_users(trainer: pl.Trainer, name: str) -> bool:
    """Whether the action `name` is a hook of the user's own module or callbacks."""
    owners = owners_of_hooks(trainer)
    owner, _, hook = name.rpartition(".")
    if owner not in owners or not hook.startswith(("on_", "configure_")):
        return False
    method = getattr(owners[owner], hook, None)
    return not str(getattr(method, "__module__", "")).startswith(_OURS)

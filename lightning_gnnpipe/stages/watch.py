"""Watching what a forward asks of modules, and what it sets on them, while it is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import currentframe
from types import FrameType
from typing import Any, cast

from torch import nn

from lightning_gnnpipe._compat_torch import CALL_OF_MODULE
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.stages.content import KeptProxyError, content_of

MISSING = object()
_PROGRESS = ("current_epoch", "global_step", "trainer", "log", "log_dict")
_OWN = __name__.partition(".")[0]


@dataclass(slots=True)
class Watched:
    """What a forward did with modules, in order.

    Attributes:
        reads: Attributes that it asked for, by module and name.
        before: What attributes that it set were before; `MISSING` where there were none.
    """

    reads: dict[tuple[nn.Module, str], None] = field(default_factory=dict)
    before: dict[tuple[nn.Module, str], Any] = field(default_factory=dict)

    def undo(self) -> None:
        """Give the modules back what was there before."""
        for (module, name), value in self.before.items():
            if value is not MISSING:
                setattr(module, name, value)
            elif hasattr(module, name):
                delattr(module, name)

    def kept(self, *, with_values: bool) -> list[str]:
        """Return the names of attributes that hold what was computed.

        Args:
            with_values: Name those as well that hold something else than before.
        """
        return [
            name
            for (module, name), before in self.before.items()
            if _is_kept(before, getattr(module, name, MISSING), with_values)
        ]


def _is_kept(before: Any, now: Any, with_values: bool) -> bool:
    try:
        return content_of(now) != content_of(before) and with_values
    except KeptProxyError:
        return True


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """Note in `watched` what the forward reads and sets on modules within the block.

    Raises:
        UnsupportedError: If the progress of the training is read, or something is logged.
    """
    kind, set_attribute = cast(Any, nn.Module), nn.Module.__setattr__

    def get(module: nn.Module, name: str) -> Any:
        frame = cast(FrameType, currentframe()).f_back
        if _is_read(name, frame):
            if name in _PROGRESS and hasattr(type(module), "current_epoch"):
                _check_progress(name, frame)
            watched.reads[module, name] = None
        return object.__getattribute__(module, name)

    def put(module: nn.Module, name: str, value: Any) -> None:
        if _is_of_forward(cast(FrameType, currentframe()).f_back):
            watched.before.setdefault((module, name), getattr(module, name, MISSING))
        set_attribute(module, name, value)

    kind.__getattribute__, kind.__setattr__ = get, put
    try:
        yield
    finally:
        del kind.__getattribute__
        kind.__setattr__ = set_attribute


def _is_read(name: str, frame: FrameType | None) -> bool:
    """Whether a forward asks for the attribute `name` in `frame`."""
    if name == "__dict__":  # in which torch and functools look others up
        return _origin(frame)[0] not in ("torch", "functools") and _is_of_forward(frame)
    return not name.startswith("__") and _is_of_forward(frame)


def _is_of_forward(frame: FrameType | None) -> bool:
    """Whether the forward, or what it calls, runs in `frame`, rather than torch.fx or we do."""
    while frame is not None and frame.f_globals.get("__name__") == nn.Module.__module__:
        if frame.f_code is CALL_OF_MODULE:  # hooks and the forward of a module
            return True
        frame = frame.f_back
    parts = _origin(frame)
    return parts[:2] != ["torch", "fx"] and (parts[0] != _OWN or parts[1:2] == ["models"])


def _origin(frame: FrameType | None) -> list[str]:
    """Return the name of the Python module whose code runs in `frame`, in parts."""
    return ("" if frame is None else str(frame.f_globals.get("__name__"))).split(".")


def _check_progress(name: str, frame: FrameType | None) -> None:
    if frame is not None and frame.f_code.co_name in ("global_rank", "local_rank"):
        return  # they stay as they are
    raise UnsupportedError(
        explain(
            expected="forward to depend on its arguments and on plain attributes",
            found=f"self.{name}",
            remedy="Set an attribute in on_train_epoch_start, and read that in forward; log in "
            "training_step.",
        )
    )

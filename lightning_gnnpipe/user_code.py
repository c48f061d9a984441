"""The user's own lines: where a value was made, where an error began.

A traceback of a run has about 30 frames of Lightning, torch and this package between the user's
call of `fit` and the failing line. `shorten` keeps the user's lines.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from types import CodeType, ModuleType, TracebackType

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_gnnpipe.errors import GNNPipeError, PeerError, UnsupportedError, first_line

log = logging.getLogger(__name__)

_PACKAGES = ("torch", "torch_geometric", "lightning", "pytorch_lightning", "torchmetrics", "wandb")


def _folders() -> tuple[str, ...]:
    own = os.path.dirname(__file__)
    found = [os.path.join(own, name) for name in os.listdir(own) if name != "models"]
    specs = (find_spec(name) for name in _PACKAGES)
    found += [os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin]
    return (*found, os.path.dirname(os.__file__) + os.sep)


_LIBRARY = _folders()
_CALLS = inspect.getsourcefile(nn.Module)  # torch's calls of a module's forward
_HERE = os.path.dirname(__file__) + os.sep
_MOST_BEHIND = 4  # library frames kept after the user's last one
_OWN = "is_users_own"
_SILENT = "is_told_by_another_process"
_GENERATED = ("<eval_with_key>", "<frozen", "<string>")


def is_users(code: CodeType) -> bool:
    """Whether `code` is the user's: not torch's, PyG's, Lightning's, Python's or ours."""
    return _is_users_file(code.co_filename)


def user_modules() -> list[ModuleType]:
    """Return the imported Python modules that the user wrote."""
    files = [(one, getattr(one, "__file__", None)) for one in list(sys.modules.values())]
    return [one for one, name in files if isinstance(name, str) and _is_users_file(name)]


def _is_users_file(name: str) -> bool:
    if "site-packages" in name or os.path.basename(name).startswith("torch_geometric."):
        return False
    return not name.startswith((*_LIBRARY, *_GENERATED))


def is_checkpointed() -> bool:
    """Whether an activation checkpoint is running, which disables gradients temporarily."""
    frames = traceback.walk_stack(inspect.currentframe())
    return any(frame.f_globals.get("__name__") == checkpoint.__module__ for frame, _ in frames)


def line_here() -> str:
    """Return the innermost user line that is running; empty if there is none."""
    frames = traceback.walk_stack(inspect.currentframe())
    lines = (_line(f.f_code.co_filename, n) for f, n in frames if is_users(f.f_code))
    return next(lines, "")


def line_of(error: BaseException) -> str:
    """Return the innermost user line on the way to `error`; empty if there is none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(f.f_code.co_filename, n) for f, n in frames if is_users(f.f_code)]
    return _line(*lines[-1]) if lines else ""


def at(line: str) -> str:
    """Return " at" and the line, as the end of a clause; empty if `line` is."""
    return f" at {line}" if line else ""


def _line(name: str, number: int) -> str:
    text = linecache.getline(name, number).strip()
    return f"{os.path.basename(name)}:{number}" + (f", `{text}`" if text else "")


def shorten(error: BaseException) -> None:
    """Reduce tracebacks of `error` and its causes to the user's lines and the place of failure.

    Errors of this package end at the user's line. Other errors keep the last frames that the user's
    last line calls. The full traceback is logged at the level DEBUG.
    """
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", "".join(traceback.format_exception(None, error, error.__traceback__)))
    if isinstance(error, GNNPipeError):
        error.__context__ = error.__cause__ or error.__context__
        error.__cause__, error.__suppress_context__ = None, True
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        is_ours = isinstance(one, GNNPipeError | PeerError)
        frames = list(_frames(one.__traceback__))
        if any(is_users(frame.tb_frame.f_code) for frame in frames):
            one.__traceback__ = _joined(_telling(frames, is_ours or _OWN in vars(one)))
        elif is_ours:
            one.__traceback__ = None
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def mark_own(error: BaseException) -> None:
    """Mark `error` as the user's own, although this package made the call."""
    vars(error)[_OWN] = True


def silence(error: BaseException) -> None:
    """Print nothing when `error` ends the program: another process prints it."""
    vars(error)[_SILENT] = True
    shown = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not is_silent(value):
            shown(kind, value, trace)

    sys.excepthook = show


def is_silent(error: BaseException) -> bool:
    """Whether another process prints `error`."""
    return _SILENT in vars(error)


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _telling(frames: list[TracebackType], is_ours: bool) -> list[TracebackType]:
    """Return the user's frames, and the last frames behind them.

    Frames of this package stay only for errors that are neither its own nor the user's.
    """
    last = max(i for i, one in enumerate(frames) if is_users(one.tb_frame.f_code))
    kept = [one for one in frames[: last + 1] if is_users(one.tb_frame.f_code)]
    behind = [one for one in frames[last + 1 :] if one.tb_frame.f_code.co_filename != _CALLS]
    if is_ours:
        names = [one.tb_frame.f_code.co_filename for one in behind]
        ours = [i for i, name in enumerate(names) if name.startswith(_HERE)]
        behind = behind[ours[-1] + 1 :] if ours else behind
    return [*kept, *behind[-_MOST_BEHIND:]]


def _joined(frames: Iterable[TracebackType]) -> TracebackType | None:
    trace = None
    for one in reversed(list(frames)):
        trace = TracebackType(trace, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return trace


_REMEDY = (
    "Move self.log and control flow on the values of tensors into training_step, or into "
    "a submodule without message passing. Or choose a smaller module with "
    "GNNPipeStrategy(pipelined_module=...), or list the layers in a method 'pipeline_layers' (see "
    "docs/choosing.md)."
)
_REMEDIES = {
    "item assignment": "Instead of h[mask] = new, write h = torch.where(mask.unsqueeze(-1), new, "
    "h), which makes a new tensor.",
    "the graph has no": "Use lists, objects and sparse features in training_step: they do not "
    "reach the pipelined module.",
}

# Error texts of torch.fx, and descriptions of the user's line.
_FAULTS = {
    "item assignment": "an assignment to some rows of a tensor",
    "control flow": "a decision on the values of a tensor (if, while, assert, bool)",
    "cannot be iterated": "a loop over a tensor",
    "'len' is not supported": "len() of a tensor, where x.size(0) is supported",
}


def _words(error: Exception) -> str:
    for text, words in _FAULTS.items():
        if text in str(error):
            return words
    text = first_line(error).replace("'Proxy' object", "a tensor of the trace")
    return f"{type(error).__name__}: {text.replace('Proxy', 'a tensor of the trace')}"


def untraceable(name: str, error: Exception) -> UnsupportedError:
    """Return the error for a forward, or a method `name`, in which a trace failed with `error`."""
    return UnsupportedError(
        expected=f"the {name} to be traceable by torch.fx",
        found=f"{_words(error)}{at(line_of(error))}",
        remedy=next((r for text, r in _REMEDIES.items() if text in str(error)), _REMEDY),
    )

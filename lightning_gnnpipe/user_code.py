"""The user's own lines: where a value was made, where an error began."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from importlib.util import find_spec
from types import ModuleType

from lightning_gnnpipe._compat_pyg import is_generated
from lightning_gnnpipe.errors import UnsupportedError, first_line

_PACKAGES = ("torch", "torch_geometric", "lightning", "pytorch_lightning", "torchmetrics", "wandb")


def _folders() -> tuple[str, ...]:
    own = os.path.dirname(__file__)
    found = [os.path.join(own, name) for name in os.listdir(own) if name != "models"]
    specs = (find_spec(name) for name in _PACKAGES)
    found += [os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin]
    return (*found, os.path.dirname(os.__file__) + os.sep)


_LIBRARY = _folders()
_GENERATED = ("<eval_with_key>", "<frozen", "<string>")


def user_modules() -> list[ModuleType]:
    """Return the imported Python modules that the user wrote."""
    files = [(one, getattr(one, "__file__", None)) for one in list(sys.modules.values())]
    return [one for one, name in files if isinstance(name, str) and is_users_file(name)]


def is_users_file(name: str) -> bool:
    """Whether a file is the user's: not torch's, PyG's, Lightning's, Python's or ours."""
    file = os.path.basename(name)
    if "site-packages" in name or is_generated(file):
        return False
    return not name.startswith((*_LIBRARY, *_GENERATED))


def line_here() -> str:
    """Return the innermost user line that is running; empty if there is none."""
    frames = reversed(traceback.extract_stack())
    lines = (_line(f.filename, f.lineno or 0) for f in frames if is_users_file(f.filename))
    return next(lines, "")


def line_and_function(error: BaseException) -> tuple[str, str]:
    """Return the innermost user line on the way to `error`, and what of PyG it calls, or empty."""
    called = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename):
            return _line(frame.filename, frame.lineno or 0), called
        called = frame.name if f"{os.sep}torch_geometric{os.sep}" in frame.filename else ""
    return "", ""


def at(line: str) -> str:
    """Return " at" and the line, as the end of a clause; empty if `line` is."""
    return f" at {line}" if line else ""


def _line(name: str, number: int) -> str:
    text = linecache.getline(name, number).strip()
    return f"{os.path.basename(name)}:{number}" + (f", `{text}`" if text else "")


_REMEDY = (
    "Move self.log and control flow on the values of tensors into training_step, or into "
    "a submodule without message passing. Or choose a smaller module with "
    "GNNPipeStrategy(pipelined_module=...), or list the layers in a method 'pipeline_layers' (see "
    "docs/choosing.md)."
)
_NEW = "Make new tensors by x.new_zeros(x.size(0), 8) or torch.rand_like(x)."
_REMEDIES = {
    "() takes 1 positional argument": _NEW,  # torch.zeros(x.size(1), 8)
    "() received an invalid combination of arguments": _NEW,
    "item assignment": "Make a new tensor: instead of h[mask] = new, h = torch.where("
    "mask.unsqueeze(-1), new, h); instead of h[:, :1] = new, h = torch.cat((new, h[:, 1:]), 1).",
    "the graph has no": "Use lists, objects and sparse features in training_step: they do not "
    "reach the pipelined module.",
    "'len' is not supported": "Write x.size(0) in place of len(x).",
    "__array_struct__": "Return the tensor from forward, and call numpy in training_step.",
    "assignment of data": "Set weights in on_train_batch_start.",
}

# Error texts of torch.fx, and descriptions of the user's line.
_FAULTS = {
    "item assignment": "an assignment to a part of a tensor",
    "control flow": "a decision on the values of a tensor (if, while, assert, bool)",
    "cannot be iterated": "a loop over a tensor",
    "'len' is not supported": "len() of a tensor",
    "__array_struct__": "a call of numpy",
}


def _words(error: Exception) -> str:
    for text, words in _FAULTS.items():
        if text in str(error):
            return words
    text = first_line(error).replace("'Proxy' object", "a tensor of the trace")
    return f"{type(error).__name__}: {text.replace('Proxy', 'a tensor of the trace')}"


def untraceable(name: str, error: Exception) -> UnsupportedError:
    """Return the error for a forward, or a method `name`, in which a trace failed with `error`."""
    line, called = line_and_function(error)
    found, remedy = _words(error), next((r for t, r in _REMEDIES.items() if t in str(error)), "")
    if called not in ("", "forward") and not remedy:
        found += f" in {called}()"
        remedy = f"Call {called}() in training_step, and pass its results to forward as arguments."
    return UnsupportedError(
        expected=f"the {name} to be traceable by torch.fx",
        found=found + at(line),
        remedy=remedy or _REMEDY,
    )

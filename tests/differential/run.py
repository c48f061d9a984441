"""A draw is run: plainly and under the strategy, and what came out is compared."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gnnpipe.errors import GNNPipeError
from tests.differential.oracle import Oracle
from tests.differential.program import Draw, Setting, text_of

Kind = Literal["equal", "plain fails", "refused", "differs", "error", "wait"]
_TOLERANCE = 1e-8
_REFUSAL = re.compile(r"lightning_gnnpipe\.errors\.(?!PeerError)\w+: (.*)")


@dataclass(frozen=True)
class Finding:
    """What came out of a draw under one setting; the text of the refusal, error or difference."""

    draw: Draw
    setting: Setting
    kind: Kind
    text: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the program is at fault."""
        return self.kind in ("differs", "error", "wait")

    @property
    def gist(self) -> str:
        """The text without what differs from case to case."""
        text = re.sub(r"\(got .*", "", self.text.partition("\n")[0])
        return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'…'", text))[:160]


def run_draw(draw: Draw, only: Setting | None, begin: Callable[[str], object]) -> list[Finding]:
    """Return what came out of a draw under `only` one or each of its settings.

    `begin` is called with the name of each setting.
    """
    known: dict[str, Any] = {}
    findings = []
    for setting in [only] if only else draw.settings():
        begin(setting.name)
        findings.append(_run_setting(draw, setting, known))
    return findings


def _run_setting(draw: Draw, setting: Setting, known: dict[str, Any]) -> Finding:
    """Return what came out of a draw under a setting; `known` is what was expected before."""
    if setting.expected not in known:
        known[setting.expected] = _results(draw, setting.expected)
    expected = known[setting.expected]
    if isinstance(expected, Exception) and setting.expected:
        return Finding(draw, setting, *_told(expected))
    found = _results(draw, setting.found)
    if isinstance(expected, Exception) and type(expected).__name__ in _names(found):
        return Finding(draw, setting, "plain fails", str(expected))
    if isinstance(found, Exception):
        return Finding(draw, setting, *_told(found))
    if isinstance(expected, Exception):
        return Finding(draw, setting, "differs", f"the plain run fails: {expected!r}")
    difference = _difference(found, expected)
    return Finding(draw, setting, "differs" if difference else "equal", difference)


def _results(draw: Draw, arguments: str) -> dict[str, Tensor] | Exception:
    """Return what the program gives; each time it is a program of its own."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            program = _load(Path(folder) / f"draw_{draw.seed}.py", text_of(draw))
            names = {"Oracle": Oracle, **vars(program)}
            return eval(f"results({arguments.replace('NODES', str(draw.graph.num_nodes))})", names)
        except Exception as error:
            return error
        finally:
            tempfile.tempdir = before


def _load(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _told(error: Exception) -> tuple[Kind, str]:
    """Return whether an error is a refusal in words, and its text."""
    refusal = _REFUSAL.search(str(error))
    if isinstance(error, GNNPipeError):
        return "refused", str(error)
    return ("refused", refusal[1]) if refusal else ("error", f"{type(error).__name__}: {error}")


def _names(found: object) -> str:
    """Return the type of an error; of one in another process, its text, which has the type."""
    return f"{type(found).__name__} {found}" if isinstance(found, Exception) else ""


def _difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return what differs first; "" for nothing. No gradient counts as one of zeros."""
    for name in {**expected, **found}:
        a, b = expected.get(name), found.get(name)
        if " gradient " in name:
            a, b = (torch.zeros(()) if one is None else one for one in (a, b))
            a, b = torch.broadcast_tensors(a, b)
        is_same = a is not None and b is not None and a.shape == b.shape
        if not is_same or not torch.allclose(
            b.double(), a.double(), _TOLERANCE, _TOLERANCE, equal_nan=True
        ):
            return f"{name}: expected {_short(a)}, found {_short(b)}"
    return ""


def _short(value: Tensor | None) -> str:
    if value is None:
        return "nothing"
    numbers = ", ".join(f"{one:.6g}" for one in value.flatten()[:4].tolist())
    return f"[{numbers}{', ...' if value.numel() > 4 else ''}] of shape {list(value.shape)}"

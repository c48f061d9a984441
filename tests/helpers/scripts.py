"""Importing the modules of a program that lies in a folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def modules_of(folder: Path, names: Sequence[str]) -> Iterator[dict[str, ModuleType]]:
    """Import the modules of `folder`; their names are common ones, so they are forgotten then."""
    path, before = list(sys.path), {name: sys.modules.pop(name, None) for name in names}
    sys.path[:0] = [str(folder), str(folder.parent), str(folder.parents[1])]
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path[:] = path
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module

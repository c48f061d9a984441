"""The pages on the API have every public name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import lightning_gnnpipe
from lightning_gnnpipe import errors, models

FOLDER = Path(__file__).parents[2] / "docs" / "api"


def documented(page: str) -> set[str]:
    """Return the names, without their modules, that a page takes from docstrings."""
    names = re.findall(r"^::: ([\w.]+)", (FOLDER / page).read_text(), re.M)
    return {name.rpartition(".")[2] for name in names}


def test_names_of_the_package_are_documented() -> None:
    public = {name for name in lightning_gnnpipe.__all__ if name != "__version__"}
    assert public <= documented("index.md") | documented("callbacks.md")


def test_models_are_documented() -> None:
    assert documented("models.md") == set(models.__all__)


def test_errors_are_documented() -> None:
    classes = inspect.getmembers(errors, inspect.isclass)
    own = {one.__name__ for _, one in classes if one.__module__ == errors.__name__}
    own.discard("Fallbacks")  # warns
    assert documented("errors.md") == own

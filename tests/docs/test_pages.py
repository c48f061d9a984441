"""What pages have: every public name and choice, pictures and tables as made, plain words."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

import lightning_gnnpipe
from lightning_gnnpipe import GNNPipeStrategy, errors, models, types
from lightning_gnnpipe.layers.support import REFUSED_CONVS
from scripts.write_api import names_in
from tests.docs.pages import PAGES, ROOT
from tests.helpers.convs import CASES, REFUSED

DOCS = ROOT / "docs"
NAMES = [name for name in lightning_gnnpipe.__all__ if not name.startswith("_")]
INSTEAD = {
    "deal": "assign",
    "deals": "assigns",
    "dealt": "assigned",
    "husk": "placeholder",
    "those of": "the noun again",
    "others": "the noun: other ranks, layers, chunks",
    "told": "given, set, logged",
    "is another": "differs, changed",
    "what waits": "the noun: buffer, queue",
    "in vain": "what happened",
    "as plainly": "works",
}
FILES = [*PAGES.values(), *sorted((ROOT / "lightning_gnnpipe").rglob("*.py"))]


def documented(*pages: str) -> set[str]:
    """Return the names, without their modules, that pages on the API take from docstrings."""
    text = "\n".join((DOCS / "api" / page).read_text() for page in pages)
    return {name.rpartition(".")[2] for name in names_in(text)}


def test_public_names_models_and_errors_are_documented() -> None:
    assert set(NAMES) <= documented("index.md", "callbacks.md")
    assert documented("models.md") == set(models.__all__)
    classes = inspect.getmembers(errors, inspect.isclass)
    own = {one.__name__ for _, one in classes if one.__module__ == errors.__name__}
    assert documented("errors.md") == own - {"Fallbacks"}  # which warns


def brightness(colour: str) -> float:
    """Return the relative luminance of WCAG, to within a few percent."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return sum(w * part**2.2 for w, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def test_help_on_the_strategy_begins_with_what_users_call() -> None:
    """Hooks of Lightning are inherited: `help()` lists them behind."""
    called = {name for name in vars(GNNPipeStrategy) if not name.startswith("_")}
    assert called == {
        "plan",
        "collect_stats",
        "collect_staleness",
        "gathered",
        "controls",
        "engine",
    }


def test_the_pictures_are_up_to_date_and_can_be_read_in_the_dark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = DOCS / "pictures"
    monkeypatch.syspath_prepend(folder)
    for name in ("svg", "draw"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import draw  # type: ignore[import-not-found]

    pictures = draw.draw_all()
    assert set(pictures) == {path.name for path in folder.glob("*.svg")}
    for name, picture in pictures.items():
        text = (folder / name).read_text()
        assert text == str(picture), "run: python docs/pictures/draw.py"
        dark = dict(re.findall(r'\[fill="(#\w+)"\]{fill:(#\w+)}', text))
        paper = brightness(dark[draw.PAPER]) + 0.05
        for colour in set(re.findall(r'<text [^>]*fill="(#\w{6})"', text)):
            assert (brightness(dark.get(colour, colour)) + 0.05) / paper > 4.5, colour


def test_examples_have_the_heading_that_the_pages_of_the_api_know() -> None:
    for path in FILES:
        assert not re.search(r"^ +Example::?$", path.read_text(), re.M), f"{path}: Examples:"


def test_the_page_on_support_lists_the_layers_that_are_tested() -> None:
    text, _ = (DOCS / "support.md").read_text().split("## Habits")
    exact = {case.conv for case in CASES}
    [line] = [one for one in text.splitlines() if one.startswith("`AGNNConv`")]
    assert set(re.findall(r"`(\w+)`", line)) == exact and f"## Exact: {len(exact)}" in text
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.M)) == REFUSED.keys()
    assert f"## Refused: {len(REFUSED)}" in text
    for kind, reason in REFUSED_CONVS.items():
        assert f"| `{kind.__name__}` | {reason} |" in text


def test_words_are_those_of_the_field() -> None:
    """And none that a reader would have to guess."""
    for path in FILES:
        found = re.findall(rf"\b({'|'.join(INSTEAD)})\b", path.read_text(), re.IGNORECASE)
        assert not found, f"{path}: write {[INSTEAD[word.lower()] for word in found]}"


def test_the_api_expands_all_names_of_values() -> None:
    text = (DOCS / "api" / "index.md").read_text().partition("## Names of values")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M))
    named = set(inspect.signature(GNNPipeStrategy).parameters.values())
    used = {w for one in named for w in re.findall(r"\w+", str(one.annotation))}
    assert rows.keys() == {name for name in used - {"Literal"} if hasattr(types, name)}
    for name, values in rows.items():
        alias = getattr(types, name)
        every = re.findall(r"'(\w+)'", str(alias))
        assert set(re.findall(r'"(\w+)"', values)) == set(every), name

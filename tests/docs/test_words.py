"""Plain words: terms of the field, and none that a reader would have to guess."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

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
}
FILES = [*PAGES.values(), *sorted((ROOT / "lightning_gnnpipe").rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_those_of_the_field(path: Path) -> None:
    text = path.read_text()
    found = [word for word in INSTEAD if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
    assert found == [], f"write {[INSTEAD[word] for word in found]}"

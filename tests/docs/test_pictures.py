"""The committed pictures are those that the script draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_pictures_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "svg", raising=False)
    monkeypatch.delitem(sys.modules, "draw", raising=False)
    import draw  # type: ignore[import-not-found]

    pictures = draw.draw_all()
    assert set(pictures) == {path.name for path in FOLDER.glob("*.svg")}
    for name, picture in pictures.items():
        assert (FOLDER / name).read_text() == str(picture), "run: python docs/pictures/draw.py"

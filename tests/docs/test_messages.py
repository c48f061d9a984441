"""The page on errors has all that the package raises, and nothing that it does not."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.messages import package_messages, refusal_reasons

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
LISTED = re.compile(r"^\| (`[^`]*`(?:, `[^`]*`)*)", re.M)


def listed() -> set[str]:
    """Return the messages in the first columns of the page's tables."""
    cells = LISTED.findall(PAGE.read_text())
    return {text for cell in cells for text in re.findall(r"`([^`]*)`", cell)}


def test_every_message_is_on_the_page() -> None:
    messages = package_messages()
    assert len(messages) > 100
    missing = [f"{place}: `{text}`" for text, place in messages.items() if text not in listed()]
    assert not missing, f"Add to {PAGE.name}:\n" + "\n".join(missing)


def test_the_page_has_no_message_of_the_past() -> None:
    from lightning_gnnpipe.layers.support import _ROW_MIXING, REFUSED_CONVS

    reasons = refusal_reasons() | {reason for _, reason in _ROW_MIXING}
    assert len(reasons) > 5
    known = set(package_messages()) | reasons | set(REFUSED_CONVS.values())
    assert listed() <= known, f"Nobody says this any more: {listed() - known}"
    assert reasons <= listed(), f"Add to {PAGE.name}: {reasons - listed()}"

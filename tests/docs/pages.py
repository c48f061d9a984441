"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
_DOCSTRINGS = re.compile(r"<!-- api .*?<!-- end -->", re.DOTALL)
_TITLE = re.compile(r'title="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block."""

    language: str  # the first word behind the fence
    title: str  # empty if it has none
    line: int  # the number of its first line in the page
    text: str


def read_blocks(page: str) -> list[Block]:
    """Return the code blocks of a page, in order, without those of docstrings."""
    text = _DOCSTRINGS.sub(lambda found: "\n" * found[0].count("\n"), PAGES[page].read_text())
    return list(_blocks(text.splitlines()))


def as_script(blocks: list[Block], first_line: str) -> str:
    """Return the Python blocks as a file with the page's line numbers, below a first line."""
    lines = [first_line]
    for block in blocks:
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join([*lines, ""])


def commands(block: Block) -> list[str]:
    """Return the commands of a `bash` block, one a line, without comments."""
    joined = re.sub(r"\\\n\s*", "", block.text)
    parts = (part.strip() for line in joined.splitlines() for part in line.split(" && "))
    return [re.sub(r"\s+# .*", "", part) for part in parts if part and not part.startswith("#")]


def _blocks(lines: list[str]) -> Iterator[Block]:
    start, info = None, ""
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start is None:
            start, info = number, fence["info"]
            continue
        text = textwrap.dedent("\n".join(lines[start : number - 1]))
        title = _TITLE.search(info)
        yield Block(info.split(" ")[0], title[1] if title else "", start + 1, text)
        start = None
    assert start is None, f"the code block of line {start} has no end"

"""Writes docstrings into the pages of docs/api: `python scripts/write_api.py`.

On a page, the text stands between two comments. The first names an object, and members of it to
show; with "###" its heading is of the third level:

    <!-- api lightning_gnnpipe.GNNPipeStrategy plan collect_stats -->
    <!-- end -->
"""

import re
from functools import cache
from pathlib import Path

from griffe import Object, load
from griffe2md import ConfigDict, default_config, render_object_docs

PAGES = Path(__file__).parent.parent / "docs" / "api"
_BLOCK = re.compile(r"<!-- api (###)? ?([\w.]+)([\w ]*) -->\n.*?<!-- end -->", re.DOTALL)
_TYPE = re.compile(r"<code>(.*?)</code>")
_LINK = re.compile(r"\[([\w.*]*)\]\(#[\w.]*\)")
_CALL = re.compile(r"^(\w+)\((?=.{80})((?:[^()]|\([^()]*\))*)\)$", re.MULTILINE)
_COMMA = re.compile(r", (?=\*|\w+[,=]|\w+$)")
_NEXT = ",\n    "
_STYLE = ConfigDict(
    **default_config
    | {
        "docstring_section_style": "list",
        "inherited_members": False,
        "separate_signature": True,
        "show_bases": False,
        "show_object_full_path": False,
        "show_root_full_path": False,
        "show_root_members_full_path": False,
        "show_signature_annotations": False,
        "signature_crossrefs": False,
        "summary": False,
    }
)


def names_in(page: str) -> list[str]:
    """Return the full names of the objects that `page` shows."""
    return [found[2] for found in _BLOCK.finditer(page)]


def fill(page: str) -> str:
    """Return `page` with docstrings of today between its comments."""
    return _BLOCK.sub(_fill_block, page)


def _fill_block(block: re.Match[str]) -> str:
    level, name, members = block.groups()
    style = ConfigDict(**_STYLE | {"heading_level": 3 if level else 2, "members": members.split()})
    shown = _package()[name.partition(".")[2]]
    text = render_object_docs(shown, style)
    text = _LINK.sub(lambda link: link[1], text)
    text = _TYPE.sub(lambda found: f"`{found[1]}`", text)
    parts = re.split(r"^(?=#+ `)", text, flags=re.MULTILINE)  # the object's, and of each member
    names = (part.partition("`")[2].partition("`")[0] for part in parts)
    found = (shown.members.get(name, shown) for name in names)
    text = "".join(map(_add_defaults, parts, found))
    text = re.sub(r"(?<!`)``(?!`)", "`", text)
    text = _CALL.sub(lambda call: f"{call[1]}(\n    {_COMMA.sub(_NEXT, call[2])},\n)", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return f"{block[0].splitlines()[0]}\n\n{text}\n\n<!-- end -->"


def _add_defaults(text: str, shown: Object) -> str:
    """Write the defaults of a class or function into the list of its parameters."""
    known = {one.name: one.default for one in getattr(shown, "parameters", ())}

    def add(found: re.Match[str]) -> str:
        default = known.get(found[2])
        return f"{found[1]}, default `{default}`)" if default is not None else found[0]

    return re.sub(r"^(- \*\*(\w+)\*\* \(`[^`\n]*`)\)", add, text, flags=re.MULTILINE)


@cache
def _package() -> Object:
    whole = {"returns_multiple_items": False}
    found = load(
        "lightning_gnnpipe",
        docstring_parser="google",
        docstring_options=whole,
        resolve_aliases=True,
    )
    assert isinstance(found, Object)
    return found


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(fill(path.read_text()))

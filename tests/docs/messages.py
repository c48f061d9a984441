"""Every message of the package, read from its source: errors and warnings, variable parts as `…`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_gnnpipe"
GAP = "…"


def package_messages() -> dict[str, str]:
    """Return where each message stands, by message."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        place = str(path.relative_to(PACKAGE.parent))
        for text, line in _messages(tree):
            found.setdefault(text, f"{place}:{line}")
    return found


def _messages(tree: ast.Module) -> Iterator[tuple[str, int]]:
    wrappers = _wrappers(tree)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        expected = next((k.value for k in call.keywords if k.arg == "expected"), None)
        if name in wrappers and expected is None:
            expected = call.args[wrappers[name]]
        if expected is not None and not isinstance(expected, ast.Name):
            yield from ((f"Expected {text}", call.lineno) for text in texts(expected))
        elif name in ("PeerError", "log.warning", "warnings.warn"):
            yield from ((text, call.lineno) for text in texts(call.args[0]))


def _wrappers(tree: ast.Module) -> dict[str, int]:
    """Return functions that hand their own parameter `expected` on to `explain`, and its place."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = {f.name: [a.arg for a in f.args.args] for f in functions if f.name != "explain"}
    return {name: args.index("expected") for name, args in names.items() if "expected" in args}


def texts(node: ast.expr) -> list[str]:
    """Return what an expression for a text may give."""
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    if isinstance(node, ast.JoinedStr):
        parts = [one.value if isinstance(one, ast.Constant) else GAP for one in node.values]
        return ["".join(map(str, parts))]
    if isinstance(node, ast.Constant):
        return [re.sub(r"%[sdr]", GAP, str(node.value))]
    return [GAP]

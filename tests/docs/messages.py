"""Every message of the package, read from its source, with `…` for what varies in it."""

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


def refusal_reasons() -> set[str]:
    """Return the reasons for which a layer is refused, where they are written out."""
    tree = ast.parse((PACKAGE / "layers" / "support.py").read_text())
    yields = [node.value for node in ast.walk(tree) if isinstance(node, ast.Yield)]
    reasons = [one.elts[0] for one in yields if isinstance(one, ast.Tuple)]
    named = [
        text for one in reasons if isinstance(one, ast.Name) for text in _all_assigned(tree, one.id)
    ]
    return {text for reason in reasons for text in texts(reason) if text != GAP} | set(named)


def _messages(tree: ast.Module) -> Iterator[tuple[str, int]]:
    wrappers = _parameters(tree, "expected")  # which hand it on to `explain`
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        expected = next((k.value for k in call.keywords if k.arg == "expected"), None)
        if name in wrappers and expected is None:
            expected = call.args[wrappers[name]]
        if isinstance(expected, ast.Name):
            expected = _assigned(tree, expected.id)
        if expected is not None:
            yield from ((f"Expected {text}", call.lineno) for text in texts(expected))
        elif _tells(call):
            yield from ((text, call.lineno) for text in _fallbacks(tree, call))
        elif name in ("PeerError", "log.warning", "warnings.warn"):
            yield from ((text, call.lineno) for text in texts(call.args[0]))


def fallbacks() -> set[str]:
    """Return what the package tells when something takes the place of what was asked for."""
    trees = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    return {
        text
        for tree in trees
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _tells(call)
        for text in _fallbacks(tree, call)
    }


def _tells(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "tell"


def _fallbacks(tree: ast.Module, call: ast.Call) -> list[str]:
    """Return the texts of one call of `Fallbacks.tell`."""
    parts = {one.arg: texts(one.value) for one in call.keywords}
    why = call.args[0]
    reasons = texts(why) if not isinstance(why, ast.Name) else _all_assigned(tree, why.id)
    remedy = f" {parts['remedy'][0]}" if "remedy" in parts else ""
    [origin] = parts["origin"]
    return [f"{one}: from {origin} to {to}.{remedy}" for one in reasons for to in parts["to"]]


def _all_assigned(tree: ast.Module, name: str) -> list[str]:
    """Return all texts that a variable `name` is given."""
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    values = [one.value for one in assignments if ast.unparse(one.targets[0]) == name]
    return [text for value in values for text in texts(value) if text != GAP]


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    """Return the text that a variable `name` is given; None if it is a parameter."""
    assignments = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    values = (node.value for node in assignments if ast.unparse(node.targets[0]) == name)
    return next((one for one in values if isinstance(one, ast.JoinedStr | ast.Constant)), None)


def _parameters(tree: ast.Module, parameter: str) -> dict[str, int]:
    """Return the functions that have a parameter of this name, and its place."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = {function.name: [one.arg for one in function.args.args] for function in functions}
    return {name: args.index(parameter) for name, args in names.items() if parameter in args}


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

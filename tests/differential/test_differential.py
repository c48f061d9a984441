"""Programs that are drawn give the same under the strategy, or are refused in words.

Each has a network, a graph and some habits; so habits meet that have tests of their own elsewhere.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_gnnpipe.errors import GNNPipeError
from tests.differential.habits import HABITS, draw_of
from tests.differential.nets import NetDraw
from tests.differential.program import SETTINGS, Draw, Setting, text_of
from tests.helpers.orders import order_of_step
from tests.helpers.reference import StaleOracle

TOLERANCE = 1e-8
REFUSAL = re.compile(r"lightning_gnnpipe\.errors\.(?!PeerError)\w+: ")
pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("seed", range(len(HABITS)))
def test_a_drawn_program_trains_the_same_or_is_refused(seed: int, tmp_path: Path) -> None:
    """In as many draws as there are habits each comes once, whatever the others are."""
    draw, known = draw_of(seed), dict[str, Any]()
    for setting in draw.settings():
        if setting.expected not in known:
            known[setting.expected] = results(draw, setting.expected, tmp_path)
        check(draw, setting, known[setting.expected], results(draw, setting.found, tmp_path))


def test_weights_that_autograd_has_saved_outlast_a_new_trace_before_backward(
    tmp_path: Path,
) -> None:
    names, setting = ("_dict", "net in eval for a pass", "weight penalty"), SETTINGS["exact, two"]
    habits = tuple(habit for habit in HABITS if habit.name in names)
    draw = replace(draw_of(0), net=NetDraw(("GCN", "GCN")), habits=habits)
    found = results(draw, setting.found, tmp_path)
    assert isinstance(found, dict)
    check(draw, setting, results(draw, setting.expected, tmp_path), found)


def check(draw: Draw, setting: Setting, expected: Any, found: Any) -> None:
    """Fail with the program, if what came out differs and is no refusal."""
    errors = [one for one in (found, expected) if isinstance(one, Exception)]
    if any(isinstance(one, GNNPipeError) or REFUSAL.search(str(one)) for one in errors):
        return
    if isinstance(expected, Exception):
        problem = f"the plain run fails: {expected!r}, the other gives {found!r}"
        if type(expected).__name__ in f"{type(found).__name__} {found}":
            return
    else:
        problem = repr(found) if errors else difference(found, expected)
    assert not problem, f"{setting}: {problem}\n{text_of(draw)}"


def results(draw: Draw, arguments: str, folder: Path) -> dict[str, Tensor] | Exception:
    """Return what the program gives; each time it is a program of its own."""
    try:
        program = load(folder / f"draw_{draw.seed}.py", text_of(draw))
        names = {"Oracle": Oracle, **vars(program)}
        found: dict[str, Tensor] = eval(
            f"results({arguments.replace('NODES', str(draw.num_nodes))})", names
        )
        return found
    except Exception as error:
        return error
    finally:
        sys.modules.pop(f"draw_{draw.seed}", None)


def load(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return what differs first; "" for nothing. No gradient counts as one of zeros."""
    for name in {**expected, **found}:
        a, b = expected.get(name), found.get(name)
        if " gradient " in name:
            a, b = (torch.zeros(()) if one is None else one for one in (a, b))
            a, b = torch.broadcast_tensors(a, b)
        is_same = a is not None and b is not None and a.shape == b.shape
        if not is_same or not torch.allclose(
            b.double(), a.double(), TOLERANCE, TOLERANCE, equal_nan=True
        ):
            return f"{name}: expected {short(a)}, found {short(b)}"
    return ""


def short(value: Tensor | None) -> str:
    if value is None:
        return "nothing"
    numbers = ", ".join(f"{one:.6g}" for one in value.flatten()[:4].tolist())
    return f"[{numbers}{', ...' if value.numel() > 4 else ''}] of shape {list(value.shape)}"


class Oracle(L.Callback):
    """Runs `net` in chunks with stale rows, as `staleness="constant"` does.

    Node n is in chunk n modulo `num_chunks`. The rows of each input are its own, and its first step
    is exact. So is a step after layers were frozen, which writes the rows anew.

    Args:
        num_chunks: Chunks of the graph.
        seed: Of the order of chunks.
    """

    def __init__(self, num_chunks: int, seed: int = 7) -> None:
        self.num_chunks, self.seed = num_chunks, seed
        self.oracles: dict[Any, StaleOracle] = {}
        self.frozen: dict[Any, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        net, loop = pl_module.net, trainer.fit_loop.epoch_loop
        own = net.forward

        def forward(x: Tensor, *args: Any) -> Any:
            if not torch.is_grad_enabled():
                return own(x, *args)
            key, frozen = key_of(net, (x, *args)), [p.requires_grad for p in net.parameters()]
            if self.frozen.setdefault(key, frozen) != frozen:
                self.frozen[key] = frozen
                if key in self.oracles:
                    return self.oracles[key].exact(x, *args)
            if key not in self.oracles:
                partition = torch.arange(x.size(0)) % self.num_chunks
                oracle = StaleOracle(Own(net, own), partition)  # type: ignore[arg-type]
                self.oracles[key] = oracle
                return oracle.exact(x, *args)
            order = order_of_step(self.num_chunks, loop.total_batch_idx, self.seed)
            return self.oracles[key].chunked(x, *args, order=order)

        net.forward = forward

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.net.__dict__.pop("forward", None)


def key_of(net: Any, args: tuple[Any, ...]) -> Any:
    """Return what rows are made of: arguments, and what the modules hold beside weights."""
    held = [*args, *net.buffers(), *(v for one in net.modules() for v in vars(one).values())]
    values = [value_of(one) for one in held]
    return tuple(map(repr, values))


def value_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.requires_grad else (value.shape, *value.flatten().tolist())
    return value if isinstance(value, bool | int | float | str) else None


class Own:
    """The network with its own forward."""

    def __init__(self, net: Any, forward: Any) -> None:
        self.named_modules, self.forward = net.named_modules, forward

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

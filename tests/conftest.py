"""What every test has to leave as it was; and no error has names of the package's insides."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

if os.environ.get("GNNPIPE_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch_geometric.nn import SAGEConv

from lightning_gnnpipe.errors import GNNPipeError
from tests.helpers.texts import INSIDES

settings.register_profile("any machine", deadline=None)  # busy ones miss any
settings.load_profile("any machine")
# PyG writes `propagate` for the first layer of a class. After one with aggr="lstm" no SAGEConv of
# the process can multiply by a sparse matrix.
SAGEConv(1, 1)
torch.set_num_threads(1)  # two cores, and tests that fork

GRACE_S = 3.0
"""How long a child may take to end after the test that started it."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark `some_cases(n)` leave n cases, always the same; the rest is slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some_cases") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, several in cases.items():
        mark = several[0].get_closest_marker("some_cases")
        assert mark is not None
        most = min(mark.args[0], len(several))
        chosen = random.Random(name).sample(range(len(several)), most)
        for turn, item in enumerate(several):
            if turn not in chosen:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def has_the_same_weights() -> None:
    """Let a test draw the same numbers in each run, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def double() -> Iterator[None]:
    """Make float64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Restore ``os.environ``; fail on what else is left, as child processes and process groups."""
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    os.environ.clear()
    os.environ.update(environment)
    leaks = _end_leaked_processes(before)
    if dist.is_available() and dist.is_initialized():
        leaks.append(f"a torch.distributed group of {dist.get_world_size()} rank(s)")
        dist.destroy_process_group()
    if torch.get_default_dtype() != dtype:
        leaks.append(f"the default dtype {torch.get_default_dtype()}")
        torch.set_default_dtype(dtype)
    if leaks:
        pytest.fail(f"The test left behind: {', '.join(leaks)}", pytrace=False)


@pytest.fixture(autouse=True)
def says_nothing_of_insides(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail on errors of the package, of this process, whose text is not for users."""
    texts, build = list[str](), GNNPipeError.__init__

    def note(self: GNNPipeError, *args: str, **parts: str) -> None:
        build(self, *args, **parts)
        texts.append(str(self))

    monkeypatch.setattr(GNNPipeError, "__init__", note)
    yield
    found = [text for text in texts if INSIDES.search(text)]
    if found:
        pytest.fail(f"Errors have names of insides: {found}", pytrace=False)


def _end_leaked_processes(before: set[int]) -> list[str]:
    new = [one for one in psutil.Process().children(recursive=True) if one.pid not in before]
    _, alive = psutil.wait_procs(new, timeout=GRACE_S if new else 0)
    leaks = []
    for child in alive:
        try:
            command = " ".join(child.cmdline())
            if "resource_tracker" in command:  # Python's own, one for the whole session
                continue
            leaks.append(f"process {child.pid} ({command or child.status()})")
            child.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=0.1)
    return leaks

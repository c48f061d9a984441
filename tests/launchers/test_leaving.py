"""A program that has done its work ends with status 0: gloo's threads end before Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script

SCRIPT = """
import atexit, os, signal, sys
from pathlib import Path


def names():
    return {one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")}


def say():  # the first that is registered runs last
    print(f"rank {RANK} ends with gloo: {'pt_gloo_runloop' in names()}", flush=True)


RANK = None
atexit.register(say)

import lightning as L
from tests.helpers.observed import fit

how = sys.argv[1]


class Stops(L.Callback):
    def on_train_epoch_end(self, trainer, *_):
        global RANK
        RANK = trainer.global_rank
        assert "pt_gloo_runloop" in names()
        if "fails" in how and trainer.current_epoch == 2:
            raise RuntimeError("stopped on purpose")
        if how == "stops" and trainer.current_epoch == 2 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    options = {
        "hybrid": {"num_stages": 2, "graph_parallel": 2},
        "async": {"num_stages": 1, "graph_parallel": 2, "async_halo": True},
    }.get(how, {})
    devices = 4 if how == "hybrid" else 2
    fit(devices, Stops(), max_epochs=4, start_method="popen", strategy=options)
"""


linux = pytest.mark.skipif(sys.platform != "linux", reason="threads are looked up in /proc")


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "num_ranks"),
    [("pipe", 2), ("hybrid", 4), ("async", 2), ("stops", 2)],  # by a signal
)
def test_threads_of_gloo_end_before_the_interpreter(
    tmp_path: Path, how: str, num_ranks: int
) -> None:
    text = run_script(tmp_path, SCRIPT, how, is_new=True).text
    assert "terminate called" not in text
    for rank in range(num_ranks):
        assert f"rank {rank} ends with gloo: False" in text


@linux
def test_a_run_that_fails_waits_for_nobody(tmp_path: Path) -> None:
    """Its groups are left as they are, and the error that all ranks share is printed."""
    text = run_script(tmp_path, SCRIPT, "fails", fails=True).text
    assert "RuntimeError: stopped on purpose" in text, text
    assert "ends with gloo: True" in text


GROUP = """
import sys
import torch.distributed as dist
from lightning_gnnpipe.comm import abandon_groups, end_groups_at_exit

init, destroy = dist.init_process_group, dist.destroy_process_group
dist.destroy_process_group = lambda: print("destroyed", flush=True) or destroy()


def make():
    init("gloo", store=dist.HashStore(), rank=0, world_size=1)


def end(is_new):
    end_groups_at_exit(is_new=is_new)


make()
exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("steps", "is_destroyed"),
    [
        ("end(True)", True),
        ("end(False)", False),  # the user's own
        ("end(True); abandon_groups()", False),
        ("end(True); abandon_groups(); end(False)", False),
        ("end(True); destroy()", False),
        ("end(True); destroy(); make()", False),
    ],
)
def test_only_groups_of_ours_are_destroyed(tmp_path: Path, steps: str, is_destroyed: bool) -> None:
    """In a fork, whose functions for the end are its own."""
    assert run_script(tmp_path, GROUP, steps).text.split() == ["destroyed"] * is_destroyed

"""The measurement of a link: right for one that keeps to the formula, and over in short time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lightning_gnnpipe.comm import Meter, Transport, World
from lightning_gnnpipe.planning import Link
from tests.helpers.scripts import ROOT, fixture_of

link = fixture_of(ROOT / "examples" / "benchmarks" / "prediction", "link", scope="module")


class Clock:
    """Stands for the module `time`; reading it takes a microsecond."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s


class Formula(Transport):
    """Exchanges that take what a link's formula says, and send nothing."""

    def __init__(self, clock: Clock, cost: Link) -> None:
        world = World(0, 2, torch.device("cpu"), timedelta(seconds=1))
        super().__init__(world, (2, 1), Meter())
        self.clock, self.cost = clock, cost

    def meet(self, what: str, numbers: Sequence[int] = ()) -> list[list[int]]:
        return [list(numbers), [0] * len(numbers)]

    def exchange(self, kind: Any, sends: Sequence[tuple[int, Tensor]], *args: Any) -> Any:
        num_bytes = sum(tensor.nbytes for _, tensor in sends)
        self.clock.now_s += self.cost.message_s + num_bytes / self.cost.bytes_per_s
        return list


@pytest.fixture
def clock(link: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(link, "time", clock)
    monkeypatch.setattr(link, "_compute", lambda device: None)
    return clock


@pytest.mark.parametrize(("gbit_per_s", "message_s"), [(0.01, 0.04), (1.0, 2e-3), (100.0, 1e-5)])
def test_a_link_that_keeps_to_the_formula_is_found(
    link: ModuleType, clock: Clock, gbit_per_s: float, message_s: float
) -> None:
    found = link.measure_link(Formula(clock, Link.of(gbit_per_s, message_s)))
    assert found.gbit_per_s == pytest.approx(gbit_per_s, rel=0.02)
    assert found.message_s == pytest.approx(message_s, rel=0.02, abs=2e-6)
    assert clock.now_s < 2


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_link_that_does_not_gets_a_speed(link: ModuleType, clock: Clock, seconds: float) -> None:
    """No time at all, or as long for all sizes."""
    found = link.measure_link(Formula(clock, Link(float("inf"), seconds)))
    assert 0 < found.bytes_per_s < float("inf") and 0 <= found.message_s <= 1.01


def measure_on(rank: int, link: ModuleType, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"), timedelta(seconds=30))
    transport = Transport(world, (2, 1), Meter())
    found = link.measure_link(transport)
    torch.save((found.bytes_per_s, found.message_s), f"{folder}/{rank}")
    dist.destroy_process_group()


def test_both_ranks_measure_the_same(link: ModuleType, tmp_path: Path) -> None:
    mp.start_processes(measure_on, (link, str(tmp_path)), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert first == second
    assert first[0] > 0 and 0 <= first[1] < 1

"""Tables in files of a folder: the same numbers as in memory, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.staleness import HistoryOptions, copies
from lightning_gnnpipe.staleness.copies import FreeTables, HostCopies
from tests.engine.test_recompute import PARTITION, N, Net, graph, train
from tests.helpers.engines import one_process_engine

CASES: dict[str, dict[str, Any]] = {
    "histories": {},
    "recompute": {"recompute": True},
    "bf16": {"history_dtype": torch.bfloat16},
    "exact in chunks, then stale": {"exact_in_chunks": True, "num_stages": 2},
    "all steps exact in chunks": {"exact_in_chunks": True},
}


def mapped(folder: Path) -> int:
    """Return the bytes that this process maps from files of `folder`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if f" {folder}" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same(case: str, tmp_path: Path) -> None:
    options = CASES[case]
    most, map_whole = [0], HostCopies.table

    def table(self: HostCopies, *args: Any) -> Tensor:
        found = map_whole(self, *args)
        most[0] = max(most[0], mapped(tmp_path))
        return found

    expected = train("mixed", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopies, "table", table)
        found = train("mixed", table_folder=tmp_path, **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key
    assert most[0] >= 4096
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mixed", "gcnii"])
def test_later_exact_steps_use_the_files_of_the_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, map_file = list[Any](), copies._open

    def count(folder: Path, *args: Any) -> Tensor:
        made.append(args)
        return map_file(folder, *args)

    monkeypatch.setattr(copies, "_open", count)
    train(name, steps=(0,), table_folder=tmp_path, exact_in_chunks=True)
    num_first = len(made)
    train(name, steps=(0, 1, 2), table_folder=tmp_path, exact_in_chunks=True)
    assert len(made) == 2 * num_first > 0


def test_a_gradient_of_several_values_is_kept_until_all_are_done(tmp_path: Path) -> None:
    expected = train("summed", exact_in_chunks=True)
    found = train("summed", exact_in_chunks=True, table_folder=tmp_path)
    for ours, theirs in zip(found, expected, strict=True):
        for key in ours:
            assert torch.equal(ours[key], theirs[key]), key


def test_two_passes_at_once_have_files_of_their_own(tmp_path: Path) -> None:
    def grads(**more: Any) -> list[Tensor]:
        torch.manual_seed(0)
        net = Net().double()
        engine = one_process_engine(net, partition=PARTITION, exact_in_chunks=True, **more)
        x, edges = graph()
        for step in range(2):  # the second takes the files of the first
            net.zero_grad()
            engine.set_step(step_index=step)
            first, second = (engine.forward((by * x, edges), {}) for by in (1, 2))
            (first.square().sum() + second.square().sum()).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    for ours, theirs in zip(grads(table_folder=tmp_path), grads(), strict=True):
        assert torch.equal(ours, theirs)


def test_memory_is_given_back_with_the_tensor(tmp_path: Path) -> None:
    tables = HostCopies(None, tmp_path / "new")
    found = tables.table((N, 1024), torch.float32, torch.device("cpu"))
    assert found.shape == (N, 1024)
    assert not found.any()
    assert mapped(tmp_path) == found.nbytes
    del found
    assert mapped(tmp_path) == 0
    assert tables.table((0, 3), torch.float32, torch.device("cpu")).shape == (0, 3)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=f"'table_folder' .got No space left .*{tmp_path}"):
        HostCopies(None, tmp_path).table((2, 3), torch.float32, torch.device("cpu"))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_takes_the_place_of_unused_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def fill(*_: Any) -> None:
        nonlocal made
        made += 1
        if mapped(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fill)
    free: FreeTables = {}
    exact, histories = HostCopies(None, tmp_path, free), HostCopies(None, tmp_path)
    exact.give_back([exact.table((2, 3), torch.float32, torch.device("cpu"))])
    assert free
    with pytest.raises(ConfigError, match="No space left"):
        histories.table((4, 3), torch.float32, torch.device("cpu"))
    histories.spare = free
    assert histories.table((4, 3), torch.float32, torch.device("cpu")).shape == (4, 3)
    assert not free and made == 4


def test_histories_and_matrices_may_take_the_place_of_unused_tables(tmp_path: Path) -> None:
    engine = one_process_engine(Net().double(), partition=PARTITION, table_folder=tmp_path)
    engine.set_step(step_index=0)
    engine.forward(graph(), {}).sum().backward()
    own = engine.graphs.trained
    assert own is not None
    own.drop(waits=True)
    keep: Any = own.graph.reading.edges.keep
    assert own.store.copies.spare is own.graph.free_tables is keep.__self__.spare


def test_layers_elsewhere_have_their_tables_on_the_host() -> None:
    options = GNNPipeStrategy(table_folder="tables", num_chunks=4).options.histories
    assert options.seen_from(torch.device("cpu")).device is None
    assert options.seen_from(torch.device("cuda")) == HistoryOptions(
        options.method, device=torch.device("cpu"), folder=Path("tables")
    )


@pytest.mark.parametrize(
    "other", [{"graph_parallel": 2}, {"history_device": "cuda"}, {"cuda_graphs": True}]
)
def test_what_has_no_tables_on_the_host_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="table_folder"):
        GNNPipeStrategy(table_folder="tables", **other)

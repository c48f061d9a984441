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
from lightning_gnnpipe.staleness import HistoryOptions
from lightning_gnnpipe.staleness.copies import HostCopies
from tests.engine.test_recompute import N, train

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


def test_memory_is_given_back_with_the_tensor(tmp_path: Path) -> None:
    copies = HostCopies(None, tmp_path / "new")
    found = copies.table((N, 1024), torch.float32, torch.device("cpu"))
    assert found.shape == (N, 1024)
    assert not found.any()
    assert mapped(tmp_path) == found.nbytes
    del found
    assert mapped(tmp_path) == 0
    assert copies.table((0, 3), torch.float32, torch.device("cpu")).shape == (0, 3)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=f"'table_folder' .got No space left .*{tmp_path}"):
        HostCopies(None, tmp_path).table((2, 3), torch.float32, torch.device("cpu"))
    assert not list(tmp_path.iterdir())


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

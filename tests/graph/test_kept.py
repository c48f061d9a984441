"""Partitions kept on disk: read again, whole or absent, and never in the way of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pymetis
import pytest
import torch
from torch import Tensor

from lightning_gnnpipe.graph import kept
from lightning_gnnpipe.graph.kept import keep_parts
from tests.helpers.observed import fit

PARTS = torch.arange(100) % 7


class Work:
    """Makes the parts, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Tensor:
        self.count += 1
        return PARTS


@pytest.fixture
def work() -> Work:
    return Work()


def keep(folder: Path, work: Work, number: int = 3) -> None:
    parts = keep_parts(folder, [number], work)
    assert parts.dtype == torch.int64 and parts.equal(PARTS)


def test_what_is_kept_is_made_once_for_each_content(tmp_path: Path, work: Work) -> None:
    for number, count in ((3, 1), (3, 1), (4, 2), (3, 2)):
        keep(tmp_path / "new", work, number)
        assert work.count == count


@pytest.mark.parametrize("change", ["empty", "short", "bit", "text", "of another", "unreadable"])
def test_other_files_are_named_and_written_again(
    change: str, tmp_path: Path, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path, work)
    [path] = tmp_path.iterdir()
    whole = bytearray(path.read_bytes())
    if change == "of another":
        keep(tmp_path, Work(), 4)
        [other] = set(tmp_path.iterdir()) - {path}
        other.replace(path)
    elif change == "unreadable":
        path.unlink()
        path.mkdir()
    else:
        whole[-30] ^= change == "bit"
        texts = {"empty": b"", "short": whole[:-4], "bit": whole, "text": b"parts\n"}
        path.write_bytes(texts[change])
    keep(tmp_path, work)
    assert work.count == 2 and "A kept partition is computed again" in caplog.messages[0]
    assert len(caplog.messages) == (2 if change == "unreadable" else 1)  # a folder is in its place
    if change != "unreadable":
        keep(tmp_path, work)
        assert work.count == 2


def test_a_full_disk_stops_no_run_and_leaves_nothing(
    tmp_path: Path, work: Work, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    keep(tmp_path, work)
    assert not list(tmp_path.iterdir())
    assert "No space left" in caplog.text


def test_runs_at_once_read_whole_files_or_none(
    tmp_path: Path, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    process = os.fork()
    if process == 0:
        status = 99
        try:
            for _round in range(200):
                for path in tmp_path.glob("[0-9a-f]*.parts"):
                    path.unlink(missing_ok=True)
                keep(tmp_path, work)
            status = len(caplog.messages)
        finally:
            os._exit(status)
    for _round in range(200):
        keep(tmp_path, work)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert not caplog.messages


def test_the_least_recently_used_make_room(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_MOST_BYTES", 1000)  # two files of 408 bytes
    for number in (1, 2):
        keep(tmp_path, work, number)
    for age, path in enumerate(sorted(tmp_path.iterdir(), key=lambda one: one.stat().st_mtime)):
        os.utime(path, (age, age))
    keep(tmp_path, work, 1)
    keep(tmp_path, work, 3)
    keep(tmp_path, work, 1)
    assert work.count == 3 and len(list(tmp_path.iterdir())) == 2
    keep(tmp_path, work, 2)
    assert work.count == 4


def test_other_users_read_what_is_kept(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = os.umask(0o027)
    keep(tmp_path, work)
    os.umask(earlier)
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o640

    def refuse(*paths: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)  # only the owner may
    keep(tmp_path, work)
    assert work.count == 1


@pytest.mark.parametrize("shards", [1, 2])
def test_a_second_run_starts_without_metis(
    shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = {"plan_folder": str(tmp_path), "graph_parallel": shards}
    weights, files = [], []
    for _run in range(2):
        trainer = fit(shards, strategy=strategy)
        weights.append(list(trainer.lightning_module.parameters()))
        files.append(sorted(tmp_path.iterdir()))
        monkeypatch.setattr(pymetis, "part_graph", None)  # processes are forked: they inherit it
    assert files[0] and files[0] == files[1]
    assert all(a.equal(b) for a, b in zip(*weights, strict=True))

"""The examples, run as a user runs them: what they print, learn and write."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from accuracy import Setting, train_once
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule
from tests.helpers.scripts import ROOT, start_script


@pytest.fixture(autouse=True)
def narrow(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")


def cells(table: str, label: str) -> list[str]:
    """Return the cells of the table's row that starts with ``label``."""
    [line] = [line for line in table.splitlines() if re.match(rf"│ +{re.escape(label)}", line)]
    return [cell.strip() for cell in line.split("│")[2:-1]]


def run_alone(script: str, folder: Path, *options: str) -> str:
    """Run an example as a program; return what it prints."""
    path, output = ROOT / "examples" / f"{script}.py", folder / "output.txt"
    done = start_script(path, *options, f"--output={folder}", is_new=False, output=output)
    done.end(240)
    assert done.returncode == 0, done.text
    return done.text


def run(script: str, monkeypatch, capsys, *options: str) -> str:
    """Run an example in this process; return what it prints."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    threads = torch.get_num_threads()
    try:
        importlib.import_module(script).main()
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


def test_the_quickstart_prints_its_table_and_draws_the_timeline(tmp_path):
    """Two processes, a table, a picture."""
    text = run_alone(
        "quickstart",
        tmp_path,
        "--dataset=digits",
        "--layers=6",
        "--channels=16",
        "--epochs=30",
        "--cores=1",
    )
    for accuracy in cells(text, "test accuracy"):
        assert float(accuracy.rstrip("%")) > 80
    assert all(float(seconds) > 0 for seconds in cells(text, "seconds a step"))
    assert cells(text, "threads") == ["1", "1", "1", "1 + 1"]
    measured, formula = (cells(text, f"bytes {how}") for how in ("measured", "by formula"))
    encoder = 64 * 16 + 16 + 2  # what both stages compute, with a number for each of two weights
    others = 6 * (16 * 16 + 1) + 16 * 10 + 10 + 2
    expected = 2 * 1797 * 16 * 4 + 1797 * 10 * 4 + (2 * encoder + others) * 4
    assert measured == formula == ["0", "0", "0", f"{expected:,}"]
    assert cells(text, "bytes of graph")[3] != "0"
    assert cells(text, "idle at best")[3] == "11.1%"
    assert (tmp_path / "timeline_epoch_29.png").read_bytes().startswith(b"\x89PNG")


def test_options_of_the_quickstart(monkeypatch, capsys):
    def parse(*options: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["quickstart.py", *options])
        return importlib.import_module("quickstart").parse_options()

    assert parse("--stages=3").chunks == 12  # four a stage
    assert parse("--stages=3", "--chunks=5").chunks == 5
    with pytest.raises(SystemExit):
        parse("--epochs=7")
    assert "--epochs must be at least 8: the first 5 are exact" in capsys.readouterr().err


@pytest.mark.slow
def test_vig_learns_digits_by_the_example(tmp_path, monkeypatch, capsys):
    options = "--dataset=digits", "--blocks=2", "--hidden=16", "--epochs=6", "--lr=0.005"
    output = run("vig_cifar", monkeypatch, capsys, *options, f"--output={tmp_path}")
    assert cells(output, "graphs to train on") == ["1,078, 359, 360"]
    assert float(cells(output, "test accuracy")[0].rstrip("%")) > 40
    assert float(cells(output, "seconds a training step")[0]) > 0


def test_pixelvig_runs_by_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GNNPIPE_DATA", str(tmp_path))
    options = "--model=pixelvig", "--blocks=1", "--epochs=1"
    output = run("vig_cifar", monkeypatch, capsys, *options, f"--output={tmp_path}")
    assert "pixelvig, 1 blocks, on digits" in output  # no CIFAR-10 below the root
    assert cells(output, "parameters") != ["0"]


def test_gin_learns_molecules_by_the_example(tmp_path, monkeypatch, capsys):
    options = "--layers=2", "--hidden=16", "--epochs=4", "--lr=0.01", "--virtual-node", "--jk=cat"
    output = run("molecules", monkeypatch, capsys, *options, f"--output={tmp_path}")
    assert float(cells(output, "test accuracy")[0].rstrip("%")) > 90


@pytest.mark.slow
def test_stages_and_micro_batches_train_as_one_process_does(tmp_path, monkeypatch, capsys):
    options = ["--layers=3", "--hidden=8", "--epochs=1", "--lr=0.01", "--dropout=0"]
    alone = run("molecules", monkeypatch, capsys, *options, f"--output={tmp_path / 'alone'}")
    text = run_alone("molecules", tmp_path, *options, "--stages=2", "--micro-batches=3")
    for label in ("parameters", "test accuracy"):
        assert cells(text, label) == cells(alone, label)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("model", ["gcnii", "resgcnplus-batch"])
@pytest.mark.parametrize("num_chunks", [None, 4])
def test_a_run_of_the_accuracy_example_learns_and_repeats_itself(num_chunks, model):
    """On two cliques of twenty nodes, one class each, with the class among the features."""
    clique = torch.combinations(torch.arange(20)).t()
    edges = torch.cat([clique, clique + 20], dim=1)
    y = torch.arange(2).repeat_interleave(20)
    x = torch.nn.functional.one_hot(y, 4).float()
    data = FullGraphDataModule(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=y))
    small = dict(num_epochs=15, num_exact_epochs=2, num_layers=2, hidden_channels=8)
    setting = Setting(**small, num_chunks=num_chunks, model=model)
    first = train_once(data, setting, seed=1)
    assert first > 0.9
    assert train_once(data, setting, seed=1) == first

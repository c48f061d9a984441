"""The quickstart, run as a user runs it: two processes, a table, a picture."""

from __future__ import annotations

import argparse
import importlib
import re
import sys

import pytest

from tests.helpers.scripts import ROOT, start_script


def row(table: str, label: str) -> list[str]:
    """Return the cells of the table's row that starts with ``label``."""
    [line] = [line for line in table.splitlines() if re.match(rf"│ +{re.escape(label)}", line)]
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_quickstart_trains_twice_prints_the_table_and_draws_the_timeline(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    options = ("--layers=6", "--hidden=16", "--epochs=30", f"--output={tmp_path}")
    path = ROOT / "examples" / "quickstart.py"
    done = start_script(path, *options, is_new=False, output=tmp_path / "output.txt")
    done.end(240)
    assert done.returncode == 0, done.text

    for accuracy in row(done.text, "test accuracy"):
        assert float(accuracy.rstrip("%")) > 80
    assert all(float(seconds) > 0 for seconds in row(done.text, "seconds an epoch"))
    measured, formula = (
        row(done.text, f"bytes an epoch, {how}") for how in ("measured", "formula")
    )
    encoder = 64 * 16 + 16  # weights of what both stages compute from the features
    expected = 2 * 1797 * 16 * 4 + 1797 * 10 * 4 + 2 * encoder * 4
    assert measured == formula == ["0", f"{expected:,}"]
    assert row(done.text, "graph parallel, 2 METIS parts")[1] != "0"
    assert row(done.text, "(S - 1) / (K + S - 1)")[1] == "11.1%"
    assert (tmp_path / "timeline_epoch_29.png").read_bytes().startswith(b"\x89PNG")


def parse(monkeypatch, *options: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *options])
    return importlib.import_module("quickstart").parse_options()


def test_chunks_default_to_four_a_stage(monkeypatch):
    assert parse(monkeypatch, "--stages=3").chunks == 12
    assert parse(monkeypatch, "--stages=3", "--chunks=5").chunks == 5


def test_too_few_epochs_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--epochs=7")
    assert "--epochs must be at least 8: the first 5 are exact" in capsys.readouterr().err

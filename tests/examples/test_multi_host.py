"""The benchmark `multi_host`: what is added to a file of figures, and what is told of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks" / "multi_host"
MODES = ["alone", "graph fp32", "pipe fp32"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("multi_host_main", FOLDER / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(program: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", ["main.py", "--modes", *MODES, *words])
    options: argparse.Namespace = program.parse_options()
    return options


def test_steps_of_all_rounds_and_calls_are_kept(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = tmp_path / "figures.json"
    options = parse(
        program, monkeypatch, "--rates", "none", "100", "--rounds", "2", f"--results={results}"
    )
    walls = iter([9.0, 4.0, 8.0, 1.0, 2.0, 9.0, 5.0, 8.0, 3.0, 2.0, 9.0, 6.0, 8.0, 2.0, 2.0])

    def measure(mode: str, _: int, rates: list[str], __: Any) -> dict[str, Any]:
        return {
            rate: {
                "steps": [[[next(walls), 0.5, 0]]],
                "bytes_by_kind": {"forward": 7},
                "bubble_frac": 0.0,
                "matmul": {"gflop_per_s": 1.0, "error": 0.0},
            }
            for rate in rates
        }

    monkeypatch.setattr(program, "measure", measure)
    known: dict[str, Any] = {}
    program.check_settings(options, known)
    program.measure_all(options, known)
    options.rounds = 1
    again = json.loads(results.read_text())
    program.check_settings(options, again)
    program.measure_all(options, again)
    again.pop("settings")
    rows = {(row["mode"], row["rate"]): row for row in program.collect(again)}
    assert rows["graph fp32", "none"]["step_s"] == 5.0  # of 4, 5 and 6
    assert rows["graph fp32", "none"]["spread_s"] == (4.0, 6.0)
    assert rows["pipe fp32", "none"]["step_s"] == 2.0  # of 1, 3 and 2
    table = [program.row_of(row, list(rows.values())) for row in rows.values()]
    assert [row[4] for row in table if row[1:3] == ["none", "pipe fp32"]] == ["2.50"]
    picture = tmp_path / "figures.png"
    program.draw(list(rows.values()), picture)
    assert picture.stat().st_size > 0


@pytest.mark.parametrize("other", [["--matmul", "medium"], ["--chunks", "8"], ["--default-malloc"]])
def test_figures_of_other_settings_are_not_mixed(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, other: list[str]
) -> None:
    known: dict[str, Any] = {}
    program.check_settings(parse(program, monkeypatch), known)
    program.check_settings(parse(program, monkeypatch), known)
    with pytest.raises(SystemExit, match="other settings"):
        program.check_settings(parse(program, monkeypatch, *other), known)

"""What `scripts/check_gpu.sh` runs on a GPU works on the CPU, small: else it would rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.scripts import ROOT, fixture_of, modules_of

FOLDER = ROOT / "examples" / "benchmarks" / "gpu"


gpu = fixture_of(FOLDER, "main", "kernels")


@pytest.mark.slow
def test_the_script_runs_checks_on_the_cpu(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "check_gpu.sh"), "--device", "cpu", "--part", "1"]
    command += ["--checks", "checkpoints between devices", "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads((tmp_path / "checks.json").read_text())
    assert found["status"] == 0 and "2 passed" in found["result"]
    assert "checkpoints between devices" in (tmp_path / "checks.md").read_text()
    assert json.loads((tmp_path / "machine.json").read_text())["card"] is None


@pytest.mark.slow
def test_checks_name_tests_that_are_there() -> None:
    with modules_of(ROOT / "scripts", ["check_gpu"]) as modules:
        checks = modules["check_gpu"].CHECKS
    work = f"import pytest\nfor path, words in {list(checks.values())}:\n"
    work += "    words = ['--collect-only', '-q', '-m', '', path, '-k', words]\n"
    work += "    print('ended with', int(pytest.main(words)))"
    command = [sys.executable, "-W", "ignore", "-c", work]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [line for line in done.stdout.splitlines() if line.startswith("ended with")]
    assert found == ["ended with 0"] * len(checks), done.stdout + done.stderr


def options_of(main: ModuleType, tmp_path: Path, *more: str) -> Any:
    sizes = ["--nodes", "300", "--edges", "1500", "--hidden", "8", "--layers", "2", "--chunks", "2"]
    return main.parse(["--device", "cpu", "--out", str(tmp_path), *sizes, "--steps", "1", *more])


@pytest.mark.slow
def test_one_run_with_rows_on_the_host(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    bench = gpu["main"].Bench(options_of(gpu["main"], tmp_path))
    with bench.graph(300, 1500) as graph:
        found = bench.train(graph=graph, layers=2, chunks=2, history_device="cpu:0")
    assert found.keys() == {"step_s", "peak_mib"} and found["step_s"] > 0, found


def test_codecs_and_kernels_are_measured(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    bench = gpu["main"].Bench(options_of(gpu["main"], tmp_path))
    assert [row["setting"] for row in bench.codecs()] == ["copy", "bf16", "int8", "int1"]
    rows = bench.kernels()
    assert {row["rows"] for row in rows} == {"all", "one chunk of 32"}
    assert all(row["repeats"] for row in rows if row["kernel"] == "the package's")
    assert len(gpu["kernels"].as_table(rows)) == len(rows) == 4 * 2 * 5

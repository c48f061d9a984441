"""What `scripts/check_gpu.sh` runs on a GPU works on the CPU, small: else it would rot."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


def test_tables_say_what_failed(
    gpu: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_once(**options: Any) -> dict[str, Any]:
        if options.get("mode") == "csr":
            raise RuntimeError("failed:\ntorch.OutOfMemoryError: CUDA out of memory.")
        return {"step_s": [0.5, 1.5, 1.0], "peak_mib": 7.0, "base_mib": 2.0}

    main = gpu["main"]
    monkeypatch.setattr(main, "train_once", train_once)
    bench = main.Bench(options_of(main, tmp_path))
    times = {row["setting"]: row for row in bench.times()}
    assert times["K = 2"]["step_s"] == 1.0 and times["K = 2"]["peak_mib"] == 5.0
    assert times["PyG, CSR"]["error"] == "out of memory"
    largest = {row["setting"]: row for row in bench.largest()}
    assert largest["K = 2"]["nodes"] == 300
    assert largest["PyG, CSR"]["then"] == "300: out of memory"
    bench.end = time.monotonic()
    assert bench.host()[0]["error"] == "not run: the time was up"
    main.save(tmp_path, "times", list(times.values()))
    main.draw(tmp_path, "times", list(times.values()))
    assert "out of memory" in (tmp_path / "times.md").read_text()
    assert (tmp_path / "times_step_s.png").stat().st_size > 0


def test_codecs_and_kernels_are_measured(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    bench = gpu["main"].Bench(options_of(gpu["main"], tmp_path))
    assert [row["setting"] for row in bench.codecs()] == ["copy", "bf16", "int8", "int1"]
    rows = bench.kernels()
    assert {row["rows"] for row in rows} == {"all", "one chunk of 32"}
    assert all(row["repeats"] for row in rows if row["kernel"] == "the package's")
    assert len(gpu["kernels"].as_table(rows)) == len(rows) == 4 * 2 * 5


def test_runs_on_a_gpu_are_set_up_together_and_train_one_by_one(
    gpu: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def train_once(turn: Path, mode: str, **_: Any) -> dict[str, Any]:
        if mode == "fails":
            raise RuntimeError("failed")
        events.append("set up")
        turn.touch()
        while turn.exists():
            time.sleep(0.001)
        events.append(f"{mode} begins")
        time.sleep(0.05)
        events.append(f"{mode} ends")
        return {"step_s": [1.0], "peak_mib": 1.0, "base_mib": 0.0}

    main = gpu["main"]
    monkeypatch.setattr(main, "train_once", train_once)
    bench = main.Bench(options_of(main, tmp_path))
    bench.device = torch.device("cuda")
    modes = ["a", "fails", "b"]
    rows = bench.train_each([{"setting": m} for m in modes], [{"mode": m} for m in modes])
    assert events == ["set up", "set up", "a begins", "a ends", "b begins", "b ends"]
    assert [(row["setting"], row.get("error")) for row in rows] == [
        ("a", None),
        ("fails", "failed"),
        ("b", None),
    ]

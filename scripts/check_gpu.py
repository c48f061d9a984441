"""Checks the package on one GPU, then measures it there; see `check_gpu.sh`.

    part 1   tests of the package, with their ranks on the GPU
    part 2   step times and peak memory in float32
    part 3   the same in bfloat16, and rows on the host
    part 4   kernels, codecs, the largest graphs

Each part writes to the folder `--out`, and the exit status is 0 if all tests passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
BENCHMARK = ROOT / "examples" / "benchmarks" / "gpu" / "main.py"
PROMISES = "tests/promises/"
# name: (file, expression of pytest's -k). Each runs in a process of its own.
CHECKS: dict[str, tuple[str, str]] = {
    "P1, one rank": (
        PROMISES + "test_p1_transparency.py",
        "plain_lightning_on and (isolated or multi or without)",
    ),
    "P1, two ranks": (PROMISES + "test_p1_transparency.py", "test_stages and (clip or decay)"),
    "P2, one rank": (
        PROMISES + "test_p2_stale_gradient.py",
        "test_one_stage and (16-warmup or 5-exact or 2-snapshot)",
    ),
    "P2, stages and shards": (PROMISES + "test_p2_stale_gradient.py", "test_stages and gcnii"),
    "P2, encoders on each stage": (
        PROMISES + "test_p2_stale_gradient.py",
        "test_stages and encoded",
    ),
    "P3": (PROMISES + "test_p3_s_invariance.py", "test_losses and (edge or batch_norm)"),
    "CUDA graphs": ("tests/chunks/test_captured.py", ""),
    "P2, as CUDA graphs": (
        PROMISES + "test_p2_stale_gradient.py",
        "test_one_stage and (16-warmup or 5-exact)",
    ),
    "P3, as CUDA graphs": (
        PROMISES + "test_p3_s_invariance.py",
        "test_losses and (gat_jk or batch_norm)",
    ),
    "P6, as CUDA graphs": (
        PROMISES + "test_p6_resume.py",
        "undisturbed and (1-defaults or 2-defaults)",
    ),
    "bf16 and fp16 mixed": ("tests/test_precision.py", "close_to_double and mixed"),
    "rows on the host": (
        "tests/engine/test_recompute.py",
        "(same or device) and not (odd or autocast)",
    ),
    "checkpoints between devices": ("tests/test_checkpoints.py", "another_device"),
    "a killed rank": (PROMISES + "test_p7_no_hang.py", "step-kill-0-fork or callback-kill-1-fork"),
    "graph batches": (PROMISES + "test_p1_batches.py", "test_stages and (jumping or transformer)"),
    "codecs": ("tests/codecs/test_codec.py", "gpu"),
}
SMALL = ("P1, two ranks", "rows on the host")
PARTS: dict[int, list[str]] = {
    2: ["--what", "times", "--precisions", "32-true"],
    3: ["--what", "times", "host", "--precisions", "bf16-mixed"],
    4: ["--what", "kernels", "codecs", "largest"],
}


def main() -> int:
    """Run the parts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda")
    add("--part", type=int, choices=[1, *PARTS], nargs="+", default=[1, *PARTS])
    add("--checks", choices=CHECKS, nargs="+", help="of part 1; on the CPU a few")
    add("--out", default="outputs/gpu")
    add("--minutes", type=float, default=9.5, help="for all parts")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is there; --device cpu shows that the script runs")
    end = time.monotonic() + 60 * options.minutes
    folder = Path(options.out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "machine.json", machine(options.device))
    has_passed = True
    for part in options.part:
        if part == 1:
            names = options.checks or (SMALL if options.device == "cpu" else CHECKS)
            has_passed = check(names, options.device, folder, end)
            continue
        share = (end - time.monotonic()) / 60 / (1 + sum(other > part for other in options.part))
        command = [sys.executable, str(BENCHMARK), "--device", options.device, *PARTS[part]]
        place = folder / f"part_{part}"
        command += ["--out", str(place), "--minutes", f"{max(share, 0):.2f}"]
        has_passed = subprocess.run(command, cwd=ROOT).returncode == 0 and has_passed
    return 0 if has_passed else 1


def machine(device: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    card = torch.cuda.get_device_name() if device == "cuda" else None
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"card": card, "cores": os.cpu_count(), "cuda": torch.version.cuda, **versions}


def check(names: Sequence[str], device: str, folder: Path, end: float) -> bool:
    """Run the checks, all at once where a GPU is; return whether all passed."""
    with ThreadPoolExecutor(len(names) if device == "cuda" else 1) as pool:
        found = list(pool.map(lambda name: run_check(name, device, end), names))
    write(folder / "checks.json", found)
    rows = [f"| {one['check']} | {one['result']} | {one['seconds']} |" for one in found]
    text = "\n".join(["| check | result | seconds |", "| --- | --- | --- |", *rows])
    (folder / "checks.md").write_text(text + "\n")
    print(text)
    for one in found:
        if one["status"]:
            print(f"\n{one['check']}\n{one['output'][-3000:]}")
    return not any(one["status"] for one in found)


def run_check(name: str, device: str, end: float) -> dict[str, Any]:
    """Run one check in a process of its own."""
    path, chosen = CHECKS[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.helpers.on_device"]
    command += ["-p", "no:cacheprovider", path, "-m", "", "-k", chosen]  # slow ones too
    environment = {**os.environ, "GNNPIPE_DEVICE": device, "OMP_NUM_THREADS": "1"}
    if name.endswith("as CUDA graphs"):
        environment["GNNPIPE_CUDA_GRAPHS"] = "1"
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its ranks end with it
    )
    result = ""
    try:
        output, _ = process.communicate(timeout=max(end - start, 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        result = "the time was up"
    status = process.returncode
    lines = output.strip().splitlines() or [""]
    if not result:
        has_ended = status in (0, 1)
        result = lines[-1].strip("= ") if has_ended else f"pytest ended with {status}"
    return {
        "check": name,
        "status": status,
        "result": result,
        "seconds": round(time.monotonic() - start, 1),
        "output": output,
    }


def write(path: Path, value: object) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

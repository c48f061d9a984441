"""Does a run that is killed again and again end with the weights of one that was left alone?

    python examples/benchmarks/soak/main.py --kills 50

Two processes train a network with dropout in a pipeline; at random times, in the middle of steps
and of saves, one of them gets SIGKILL, SIGTERM or SIGINT. All must end soon; the run is started
again and goes on from its last checkpoint. Exit status 1 if the weights differ by a single bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

TRAIN = Path(__file__).with_name("train.py")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    epochs = 6 * options.kills + 10
    arguments = [f"--epochs={epochs}", f"--stages={options.stages}"]
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, disturbed = Path(folder, "undisturbed"), Path(folder, "disturbed")
        for one in (undisturbed, disturbed):
            one.mkdir()
        if _start(undisturbed, arguments).wait() != 0:
            raise RuntimeError("The undisturbed run failed.")
        kills, slowest_s = _disturb(disturbed, arguments, options, epochs)
        expected = torch.load(undisturbed / "weights.pt", weights_only=True)
        found = torch.load(disturbed / "weights.pt", weights_only=True)
    difference = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    print(
        "| kills | by signal | epochs | longest time until all ranks had ended | "
        "largest difference of weights |"
    )
    print("|" + " --- |" * 5)
    by_signal = ", ".join(f"{name} {count}" for name, count in sorted(kills.items()))
    print(
        f"| {sum(kills.values())} | {by_signal} | {epochs} | {slowest_s:.1f} s | {difference:g} |"
    )
    return int(difference != 0)


def _disturb(
    folder: Path, arguments: list[str], options: argparse.Namespace, epochs: int
) -> tuple[Counter[str], float]:
    """Kill and start again until the run has ended by itself; return kills and the longest end."""
    chance = random.Random(options.seed)
    kills: Counter[str] = Counter()
    slowest_s = 0.0
    while True:
        for file in folder.glob("rank_*"):
            file.unlink()
        process = _start(folder, arguments)
        if sum(kills.values()) == options.kills:
            if process.wait() != 0:
                raise RuntimeError("The last run failed.")
            return kills, slowest_s
        pids = _wait_for_epochs(folder, process, options.stages, chance.randint(1, 5))
        time.sleep(chance.random() * 0.2)
        number = chance.choice(SIGNALS)
        victim = chance.randrange(options.stages)
        started = time.monotonic()
        try:
            os.kill(pids[victim], number)
        except ProcessLookupError:
            raise RuntimeError("The run ended before it was killed: give it more epochs.") from None
        _wait_for_end(process, pids)
        slowest_s = max(slowest_s, time.monotonic() - started)
        kills[number.name] += 1
        print(
            f"{sum(kills.values())}: {number.name} to rank {victim}, "
            f"{time.monotonic() - started:.1f} s",
            file=sys.stderr,
        )


def _start(folder: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(TRAIN), str(folder), *arguments],
            env=environment,
            stdout=log,
            stderr=log,
        )


def _wait_for_epochs(
    folder: Path, process: subprocess.Popen[bytes], num_stages: int, count: int
) -> list[int]:
    """Return the process ids of all ranks once they have made `count` epochs."""
    deadline = time.monotonic() + START_TIMEOUT_S
    first: list[int] | None = None
    while time.monotonic() < deadline and process.poll() is None:
        files = [folder / f"rank_{rank}" for rank in range(num_stages)]
        if all(file.exists() for file in files):
            beats = [[int(number) for number in file.read_text().split()] for file in files]
            first = first or [epoch for _, epoch in beats]
            if all(epoch - begin >= count for (_, epoch), begin in zip(beats, first, strict=True)):
                return [pid for pid, _ in beats]
        time.sleep(0.005)
    process.kill()
    raise RuntimeError(
        f"The run did not get under way:\n{(folder / 'log.txt').read_text()[-4000:]}"
    )


def _wait_for_end(process: subprocess.Popen[bytes], pids: list[int]) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while process.poll() is None or any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise RuntimeError(f"Ranks {pids} are still there {END_TIMEOUT_S:.0f} s after a kill.")
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())

"""Draw small programs, train each plainly and under the strategy, and report where they differ.

    python scripts/differential.py --draws 500 --jobs 2

A program is a network, a graph and a few habits of users. It is trained with one chunk, with four
and exact steps, with stale rows against the oracle of the tests, and one in five on two stages. A
difference, an error that is no refusal in words, or a wait is a failure: the program is printed.
The exit status is 1 then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.differential.draw import draw_of
from tests.differential.run import Finding
from tests.differential.workers import Task, run_tasks

from tests.differential.program import script_of


def main() -> int:
    """Run the draws; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=500, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit_s", type=float, default=90.0, help="longest wait for a setting")
    arguments = parser.parse_args()
    run = partial(run_tasks, num_processes=arguments.jobs, limit_s=arguments.limit_s)
    start_s = time.monotonic()
    seeds = range(arguments.seed, arguments.seed + arguments.draws)
    findings: list[Finding] = []
    for found in run([(draw_of(seed), None) for seed in seeds]):
        findings += found
        for one in found:
            if one.is_failure:
                print(
                    f"{one.kind}: seed {one.draw.seed}, {one.setting.name}: {one.draw.names}",
                    flush=True,
                )
    failures = distinct(one for one in findings if one.is_failure)
    for failure in failures:
        show(failure, run)
    print(f"{len(seeds)} draws in {(time.monotonic() - start_s) / 60:.1f} minutes.")
    print(summary(findings))
    return 1 if failures else 0


def distinct(failures: Iterable[Finding]) -> list[Finding]:
    """Return one failure of those of one kind with the same habits."""
    return list({(one.kind, one.draw.names): one for one in failures}.values())


def show(failure: Finding, run: Callable[[list[Task]], Iterator[list[Finding]]]) -> None:
    """Print a failure, with the program; say if it takes what ran before in the process."""
    [[alone]] = run([(failure.draw, failure.setting)])
    print(f"\n{'=' * 80}\n{failure.kind}: {failure.setting.name}\n{failure.text[:2000]}")
    if not alone.is_failure:
        print("Alone in a process it does not fail: another setting left something behind.")
    print(f"\n{script_of(failure.draw, failure.setting)}")


def summary(findings: Iterable[Finding]) -> str:
    """Return how many findings there are of each kind, by setting, and the refusals by text."""
    findings = list(findings)
    counts = Counter((one.setting.name, one.kind) for one in findings)
    lines = [f"{number:6d}  {kind}: {name}" for (name, kind), number in sorted(counts.items())]
    refusals = Counter(one.gist for one in findings if one.kind == "refused")
    lines += ["Refused:", *(f"{number:6d}  {text}" for text, number in refusals.most_common())]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

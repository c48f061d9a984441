"""One rank of one training, at several rates of the network in turn: prints one line of JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch

sys.path.append(str(Path(__file__).parents[1]))
from hosts import limit_rate, received_bytes
from train_once import make_data, make_module, make_parser, make_source, make_trainer

from lightning_gnnpipe import GNNPipeStrategy


class Moment(NamedTuple):
    """The end of a step: on the clock, in time of the thread that computes, in bytes received."""

    wall_s: float
    thread_s: float
    received: int


class MeasureAtRates(L.Callback):
    """Warms up without a limit, then makes some steps at each rate, of which the first is not told.

    A step is counted from the end of the one before: what it leaves behind on its way is not free.

    Args:
        rates: In Mbit/s; None for no limit.
        num_warm: Steps before the first rate.
        num_steps: Steps that are measured at each rate.
    """

    def __init__(self, rates: list[float | None], num_warm: int, num_steps: int) -> None:
        self.rates, self._num_warm, self._num_each = rates, num_warm, num_steps + 1
        self._links = os.environ.get("LINKS", "").split()
        self._ends: list[Moment] = []
        self._stats: Any = None

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self._num_warm + len(self.rates) * self._num_each

    def on_train_batch_start(self, *_: Any) -> None:
        number, rest = divmod(len(self._ends) - self._num_warm, self._num_each)
        if number >= 0 and rest == 0:
            for link in self._links:
                limit_rate(link, self.rates[number])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._ends.append(Moment(time.perf_counter(), time.thread_time(), received_bytes()))
        if len(self._ends) == self.num_steps and isinstance(trainer.strategy, GNNPipeStrategy):
            self._stats = trainer.strategy.collect_stats()

    def result(self) -> dict[str, Any]:
        """Return this rank's figures; of each rate the steps, as differences of moments."""
        at_rates = []
        for number in range(len(self.rates)):
            first = self._num_warm + number * self._num_each
            ends = self._ends[first : first + self._num_each]
            at_rates.append([[y - x for x, y in zip(a, b, strict=True)] for a, b in pairwise(ends)])
        return {
            "steps": at_rates,
            "bytes_by_kind": self._stats.bytes_by_kind,
            "bubble_frac": self._stats.bubble_frac,
            "matmul": measure_matmul(),
        }


def measure_matmul() -> dict[str, float]:
    """Return how fast and how exact a float32 product is: 2,812 x 128 rows, as of 32 chunks.

    `error` is the largest difference from the product in float64, to the largest value.
    """
    rows, weight = torch.randn(2812, 128), torch.randn(128, 128)
    exact = rows.double() @ weight.double()
    took = []
    for _ in range(50):
        start = time.perf_counter()
        product = rows @ weight
        took.append(time.perf_counter() - start)
    gflop = 2 * rows.numel() * weight.size(1) / 1e9
    error = (product - exact).abs().max() / exact.abs().max()
    return {"gflop_per_s": gflop / statistics.median(took), "error": float(error)}


def main() -> None:
    parser = make_parser()
    parser.add_argument("--rates", nargs="+", required=True, help="Mbit/s, or none")
    options = parser.parse_args()
    torch.set_float32_matmul_precision(options.matmul)
    rates = [None if rate == "none" else float(rate) for rate in options.rates]
    measure = MeasureAtRates(rates, options.warm, options.steps)
    data = make_data(options)
    trainer = make_trainer(options, measure, measure.num_steps)
    trainer.fit(make_module(options, data), make_source(options, data))
    print(json.dumps(measure.result()))


if __name__ == "__main__":
    main()

"""P7: `trainer.should_stop` on one rank alone stops all ranks, or ends them with the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scripts import run_script

SCRIPT = """
import sys
from datetime import timedelta

import lightning as L
from torch.utils.data import DataLoader

from tests.helpers.observed import make_data, make_module
from tests.helpers.trainers import quiet_trainer

where, rank, options = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])


class Stops(L.Callback):
    def stop(self, trainer, place):
        if place == where and trainer.current_epoch == 1 and trainer.global_rank == rank:
            trainer.should_stop = True

    def on_train_batch_start(self, trainer, module, batch, number):
        self.stop(trainer, f"start {number}")

    def on_train_batch_end(self, trainer, module, out, batch, number):
        self.stop(trainer, f"end {number}")

    def on_validation_end(self, trainer, *_):
        self.stop(trainer, "validation")

    def on_fit_end(self, trainer, *_):
        print(f"rank {trainer.global_rank} made {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    data = make_data().data
    train, validate = (DataLoader([data] * count, batch_size=None) for count in (4, 1))
    strategy = {"num_chunks": 3, "timeout": timedelta(seconds=20)}
    settings = {"max_epochs": 4, "num_sanity_val_steps": 0, "callbacks": [Stops()], **options}
    trainer = quiet_trainer(2, strategy, **settings)
    trainer.fit(make_module(), train, validate)
"""
HALF: dict[str, Any] = {"val_check_interval": 0.5}


@pytest.mark.some_cases(3)
@pytest.mark.parametrize(
    ("where", "rank", "options", "steps"),
    [
        ("start 1", 0, {}, 6),
        ("end 1", 0, HALF, 6),  # before a validation that is due
        ("end 1", 1, HALF, 6),
        ("end 1", 0, HALF | {"min_epochs": 3}, 12),
        ("validation", 1, {}, 8),
        ("validation", 0, HALF, 6),
        ("end 3", 1, {"val_check_interval": 3, "check_val_every_n_epoch": None}, None),
        ("end 1", 0, {}, None),  # the rank validates, the other one trains
        ("end 1", 1, {}, None),
    ],
)
def test_p7_a_stop_of_one_rank(
    where: str, rank: int, options: dict[str, Any], steps: int | None, tmp_path: Path
) -> None:
    if steps is None:
        text = run_script(tmp_path, SCRIPT, where, rank, options, fails=True).text
        assert "wants to stop early" in text and "did not answer" not in text, text[-3000:]
    else:
        text = run_script(tmp_path, SCRIPT, where, rank, options).text
        assert text.count(f" made {steps} steps") == 2, text[-3000:]
        assert text.count(f"Rank {rank} has set trainer.should_stop, so all") == 1, text[-3000:]

"""What a run on two devices that fails prints: a refusal shortly, with the words at the end."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from lightning_gnnpipe.trainer import processes
from tests.helpers.cases import slow
from tests.helpers.scripts import run_script

SCRIPT = """
import sys
import lightning as L
from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.models import NodeClassifier
from tests.helpers.observed import make_data, make_module

ranks = [0, 1] if sys.argv[2] == "all" else [int(sys.argv[2])]


class Module(NodeClassifier):
    def training_step(self, batch, batch_idx):
        if self.global_rank in ranks and sys.argv[1] == "mistake":
            batch["missing"]
        if self.global_rank in ranks and sys.argv[1] == "refusal":
            raise ConfigError("It is not so.\\nWrite this.")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    method = sys.argv[3] if sys.argv[3:] else "popen"
    num_chunks = 1000 if sys.argv[1] == "chunks" else 2
    strategy = GNNPipeStrategy(num_chunks=num_chunks, start_method=method)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=2, strategy=strategy, logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(make_module().net, 3), datamodule=make_data())
"""
FIT = "trainer.fit(Module(make_module().net, 3), datamodule=make_data())"


@pytest.mark.parametrize("ranks", ["all", slow("1"), slow("0")])
def test_a_refusal_ends_with_its_words_and_shows_the_users_lines_alone(
    ranks: str, tmp_path: Path
) -> None:
    text = run_script(tmp_path, SCRIPT, "refusal", ranks, is_new=True, fails=True).text
    first = "0" if ranks == "all" else ranks
    assert f"[rank{first}]: lightning_gnnpipe.errors.ConfigError: It is not so.\n" in text, text
    assert text.endswith("]: Write this.\n"), text
    assert FIT in text and text.count('raise ConfigError("') == 1, text
    for folder in ("trainer", "engine", "steps", "comm"):
        assert f"lightning_gnnpipe{os.sep}{folder}{os.sep}" not in text, text
    assert text.count("Traceback") <= 2 and len(text.splitlines()) <= 62, text


@pytest.mark.parametrize("ranks", ["1", "all"])
def test_a_users_mistake_shows_its_lines_and_what_they_call_once(
    ranks: str, tmp_path: Path
) -> None:
    """The way of the Trainer to them is left out, and another rank's equal mistake."""
    text = run_script(tmp_path, SCRIPT, "mistake", ranks, fails=True).text
    for line in ("Traceback", FIT, "storage.py", "KeyError: 'missing'"):
        assert line in text, text
    assert text.count('batch["missing"]') == 1, text
    assert len(re.findall("^Rank . failed: KeyError", text, re.MULTILINE)) == 1, text
    assert "fit_loop.py" not in text, text


def test_of_forks_each_keeps_its_lines(tmp_path: Path) -> None:
    """torch shows the error of one of them."""
    text = run_script(tmp_path, SCRIPT, "mistake", "all", "fork", fails=True).text
    assert 'batch["missing"]' in text, text


@pytest.mark.parametrize("is_refusal", [True, False])
def test_a_traceback_is_shortened_whatever_its_causes(is_refusal: bool) -> None:
    """Even of an error that is its own cause, or has no traceback."""
    found: BaseException | None = None
    try:
        try:
            torch.zeros(2).view(3)
        except RuntimeError as error:
            raise error from error
    except RuntimeError as error:
        found = error
    assert found is not None
    processes._shorten(found, keeps_rest=not is_refusal)
    assert found.__traceback__ is not None
    assert found.__traceback__.tb_frame.f_code.co_filename == __file__
    processes._shorten(KeyError("bare"), keeps_rest=not is_refusal)


def test_too_many_chunks_are_refused_before_processes_start(tmp_path: Path) -> None:
    text = run_script(tmp_path, SCRIPT, "chunks", "all", fails=True).text
    assert "'num_chunks' to be between 1 and the number of nodes" in text.splitlines()[-1]
    assert "Initializing distributed" not in text, text

"""Random bytes and truncations of a checkpoint: it loads, or is refused; no code runs, no hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnnpipe.errors import CheckpointError
from tests.helpers.observed import make_data, make_module, make_trainer

NUM_RUNS = int(os.environ.get("GNNPIPE_FUZZ", "30"))


def fit(folder: Path, resume: Path | None = None) -> None:
    checkpoint = ModelCheckpoint(folder, filename="one", every_n_epochs=2)
    options = {"max_epochs": 2, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = make_trainer(1, 2, checkpoint, strategy={"self_check": False}, **options)
    trainer.fit(make_module(), datamodule=make_data(), ckpt_path=resume)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole")
    fit(folder)
    yield folder / "one.ckpt"


@settings(
    max_examples=NUM_RUNS,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_damaged_file_loads_or_is_refused(whole: Path, data: st.DataObject) -> None:
    ident = torch.load(whole, weights_only=True)["gnnpipe"]["histories"]
    histories = whole.parent / ".gnnpipe" / ident / "stage_0.pt"
    target = data.draw(st.sampled_from([whole, histories]))
    content = target.read_bytes()
    damaged, place = bytearray(content), st.integers(0, len(content) - 1)
    match data.draw(st.sampled_from(["truncated", "changed", "random"])):
        case "truncated":
            damaged = damaged[: data.draw(place)]
        case "changed":
            for _ in range(data.draw(st.integers(1, 8))):
                damaged[data.draw(place)] = data.draw(st.integers(0, 255))
        case "random":
            damaged = bytearray(data.draw(st.binary(max_size=4096)))
    target.write_bytes(damaged)
    try:
        fit(whole.parent / "again", whole)
    except (CheckpointError, RuntimeError, KeyError, TypeError, ValueError):
        pass  # refused: by the strategy, or by Lightning's own look at weights and loops
    finally:
        target.write_bytes(content)

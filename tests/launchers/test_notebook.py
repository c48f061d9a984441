"""In a notebook: ranks are forks, and what a user looks at afterwards has come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scripts import ROOT, run_script

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
INTERACTIVE = """
import sys
from lightning.fabric.utilities import imports
from lightning.pytorch.trainer.connectors import accelerator_connector

imports._IS_INTERACTIVE = accelerator_connector._IS_INTERACTIVE = True
"""
# What a notebook does: cells that share a namespace.
CELLS = """
import json, pathlib, torch

torch.set_num_threads(1)
sys.path.insert(0, sys.argv[2])
names = {"__name__": "__main__"}
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text())["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]).replace("max_epochs=50", "max_epochs=8"), names)
trainer, losses, logits = names["trainer"], names["losses"], names["logits"]
assert names["would_train"]
assert trainer.num_devices == 2 and len(losses.losses) == 8 and logits.shape == (1797, 10)
print("all cells have run")
"""
CALLBACKS = """
import lightning as L
import torch

from tests.helpers.observed import make_data, make_module, make_trainer


class Keeps(L.Callback):
    def __init__(self):
        self.losses, self.owner, self.file = [], None, None

    def on_train_epoch_end(self, trainer, pl_module):
        self.losses.append(trainer.callback_metrics["train_loss"])
        self.owner, self.file = (trainer, pl_module.net), open(__file__)


class Predicts(type(make_module())):
    def predict_step(self, batch, batch_idx):
        return {"rows": super().predict_step(batch, batch_idx).repeat(1000, 1), "text": "a"}


torch.set_num_threads(1)
module, keeps = make_module(), Keeps()
module.__class__ = Predicts
trainer = make_trainer(2, 4, keeps, start_method=sys.argv[1])
trainer.fit(module, datamodule=make_data())
assert len(set(map(float, keeps.losses))) == 3
assert keeps.owner[0] is trainer and keeps.owner[1] is module.net and keeps.file is None
[found] = trainer.predict(module, datamodule=make_data(), return_predictions=True)
assert found["rows"].shape == (40_000, 3) and found["text"] == "a"
expected = module.eval()(make_data().data)
torch.testing.assert_close(found["rows"][:40], expected)
assert trainer.predict(module, datamodule=make_data(), return_predictions=False) is None
print("all has come back")
"""


def test_the_example_runs_cell_by_cell(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs")] == []
    text = run_script(tmp_path, INTERACTIVE + CELLS, NOTEBOOK, NOTEBOOK.parent).text
    assert "all cells have run" in text and "Verdict: would be pipelined" in text
    assert "can only be forked" not in text


@pytest.mark.slow
def test_a_way_that_notebooks_do_not_have_is_replaced_and_told_once(tmp_path: Path) -> None:
    text = run_script(tmp_path, INTERACTIVE + CALLBACKS, "spawn").text
    assert "all has come back" in text
    told = "processes can only be forked: from start_method='spawn' to start_method='fork'."
    assert text.count(told) == 1


HABITS = {
    "a notebook, several devices": (
        "processes are forks; weights, predictions and callbacks come back",
        test_the_example_runs_cell_by_cell,
    ),
}

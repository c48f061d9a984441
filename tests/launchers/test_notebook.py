"""In a notebook: ranks are forks; weights and the last metrics come back."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.scripts import ROOT, run_script

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
INTERACTIVE = """
import sys
from lightning.fabric.utilities import imports
from lightning.pytorch.trainer.connectors import accelerator_connector

sys.ps1 = ">>> "
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
        exec("".join(cell["source"]).replace("max_epochs=50", "max_epochs=20"), names)
trainer, logits = names["trainer"], names["logits"]
assert trainer.num_devices == 2 and logits.shape == (1797, 10)
accuracy = names["is_right"].float().mean()
assert accuracy > 0.8, accuracy
print("all cells have run")
"""


def test_the_example_runs_cell_by_cell(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs")] == []
    text = run_script(tmp_path, INTERACTIVE + CELLS, NOTEBOOK, NOTEBOOK.parent).text
    assert "all cells have run" in text and "Fastest: Trainer(" in text

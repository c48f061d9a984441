"""`gnnpipe check script.py` and `check(module, data)`: what a user runs first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe import GNNPipeStrategy, check
from lightning_gnnpipe.cli import commands as cli
from lightning_gnnpipe.models import GNN, NodeClassifier
from tests.helpers.batches import SIZES, GraphModule, draw_batch
from tests.helpers.observed import NUM_CLASSES, NUM_FEATURES, WIDTH, make_data, make_module

SCRIPT = """
import sys

import lightning as L
import torch
from torch.nn import functional as F
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = NET
        self.head = torch.nn.Linear(8, 3)

    def training_step(self, data, batch_idx):
        print("a step")
        out = self.head(self.net(data.x, data.edge_index))
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        self.log("loss", loss)
        self.logger.experiment.add_scalar("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    assert sys.argv[1:] == ["--lr", "3"]
    node = torch.arange(40)
    edge_index = torch.stack([node.repeat(3), torch.cat([(node + hop) % 40 for hop in (1, 2, 7)])])
    data = Data(x=torch.rand(40, 5), edge_index=edge_index, y=node % 3, train_mask=node < 20)
    TRAINER.fit(Module(), DataLoader([data], batch_size=1))
    print("trained")
"""
ATTENTION = """
import torch
from torch_geometric import nn as gnn


class WithAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.attention = gnn.GCNConv(5, 8), gnn.GPSConv(8, gnn.GCNConv(8, 8))

    def forward(self, x, edge_index):
        return self.attention(self.conv(x, edge_index), edge_index)
"""
GCN = "gnn.models.GCN(5, 8, num_layers=4, out_channels=8)"
TRAINER = "L.Trainer(accelerator='cpu', devices=2, strategy='ddp')"


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def gnnpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """Runs `gnnpipe check` on a script in this process; returns the status and what it prints."""
    monkeypatch.setattr("sys.path", list(sys.path))

    def run(text: str, *options: str, net: str = GCN, trainer: str = TRAINER) -> tuple[int, str]:
        path = tmp_path / "train.py"
        path.write_text(text.replace("NET", net).replace("TRAINER", trainer))
        monkeypatch.setattr("sys.argv", ["gnnpipe", "check", *options, str(path), "--lr", "3"])
        status, printed = cli.main(), capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err
        return status, printed.out + printed.err

    return run


def test_a_script_that_does_not_know_the_package_is_checked_and_not_run(
    gnnpipe: Run, tmp_path: Path
) -> None:
    fit = L.Trainer.fit
    status, text = gnnpipe(SCRIPT)
    assert status == 0 and L.Trainer.fit is fit
    assert "trained" not in text and "a step" in text
    for words in (
        "Plain Trainer: losses 1.",
        "GNNPipeStrategy: losses 1.",
        "Pipelined: 'net', a GCN with 4 message-passing layers.",
        "Whole on each device: head.",
        "Exact: validation, test and predict, and 1 of 4 training steps here.",
        "% of the rows read from other chunks.",
        "Stage 0: convs.0",
        "Stage 1: convs.",
        "one device under the strategy 0.0",
        "Expected gain: ",
        "Verdict: would be pipelined.",
    ):
        assert words in text, text
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_what_is_refused_is_said_with_its_remedy(gnnpipe: Run) -> None:
    status, text = gnnpipe(ATTENTION + SCRIPT, net="WithAttention()")
    assert status == 1
    assert "Verdict: refused.\nExpected every layer to be exact on chunks of the graph" in text
    assert "its softmax attention runs over all nodes" in text
    assert "With num_chunks=1 it trains, exactly; nothing overlaps then.\n" in text


def test_the_strategy_and_the_devices_of_the_script_count(gnnpipe: Run) -> None:
    own = "from lightning_gnnpipe import GNNPipeStrategy\n" + SCRIPT
    trainer = "L.Trainer(accelerator='cpu', devices=4, strategy=GNNPipeStrategy(num_chunks=1))"
    status, text = gnnpipe(own, trainer=trainer)
    assert status == 0 and "Stage 3:" in text
    assert "Verdict: would train, but exactly in each step, so that nothing overlaps." in text
    status, text = gnnpipe(own, "--num_devices=5", trainer=trainer)
    assert status == 1 and "got 5 stages and 4 layers" in text


def test_a_script_that_fails_or_does_not_train_is_no_traceback_of_ours(
    gnnpipe: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for text, found in (
        ("x = 1 / 0", r"got ZeroDivisionError: division by zero at train.py:1, `x = 1 / 0`)"),
        ("x = 1", "got its end)"),
        ("raise SystemExit(3)", "got its end, with status 3)"),
    ):
        status, printed = gnnpipe(text)
        assert status == 1 and "Expected a script that calls Trainer.fit" in printed
        assert found in printed
    monkeypatch.setattr("sys.argv", ["gnnpipe", "check", "nowhere.py"])
    assert cli.main() == 1
    assert "No such file" in capsys.readouterr().err


def test_the_own_error_of_a_module_is_no_refusal_of_the_strategy(gnnpipe: Run) -> None:
    status, text = gnnpipe(SCRIPT, net="gnn.models.GCN(6, 8, num_layers=4)")
    assert status == 1 and "Expected a module that trains in a plain Trainer (got Runtim" in text
    assert "Mend that first" in text


def test_a_script_of_the_other_package_says_which_import_to_use(gnnpipe: Run) -> None:
    pytest.importorskip("pytorch_lightning")
    other = SCRIPT.replace("import lightning as L", "import pytorch_lightning as L")
    status, text = gnnpipe(other)
    assert status == 1 and "import lightning as L" in text


class Embedded(NodeClassifier):
    """Has one row of weights a node, so that it does not run on a part."""

    def forward(self, data: Data) -> Tensor:
        return self.net(self.rows.weight, data.edge_index)


def test_a_large_graph_is_tried_in_part_unless_that_fails(capsys: Any) -> None:
    num_nodes = 6000
    node = torch.arange(num_nodes)
    data = Data(
        x=torch.rand(num_nodes, NUM_FEATURES),
        edge_index=torch.stack([node, (node + 1) % num_nodes]),
        y=node % NUM_CLASSES,
        train_mask=node % 10 == 3,
        val_mask=node % 10 == 4,
    )
    sizes: set[int] = set()

    class Sized(NodeClassifier):
        def forward(self, data: Data) -> Tensor:
            sizes.add(data.num_nodes)
            return super().forward(data)

    net = GNN(NUM_FEATURES, WIDTH, NUM_CLASSES, 3)
    assert check(Sized(net, NUM_CLASSES), data)
    text = capsys.readouterr().out
    assert "on a part of the graph: losses" in text
    assert min(sizes) <= 2000 and max(sizes) == num_nodes  # the plan is of all
    module = Embedded(net, NUM_CLASSES)
    module.rows = nn.Embedding(num_nodes, NUM_FEATURES)
    check(module, data, strategy=GNNPipeStrategy(num_chunks=1))
    text = capsys.readouterr().out
    assert "Plain Trainer: losses" in text


def test_the_module_and_the_random_numbers_are_left_as_they_are(capsys: Any) -> None:
    module, data = make_module(), make_data()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    assert check(module, data)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert capsys.readouterr().err == ""


class Augmented(NodeClassifier):
    def forward(self, data: Data) -> Tensor:
        return self.net(data.x + torch.rand_like(data.x), data.edge_index)


def test_what_would_be_exact_is_said_with_the_reason(capsys: Any) -> None:
    net = GNN(NUM_FEATURES, WIDTH, NUM_CLASSES, 3)
    assert check(Augmented(net, NUM_CLASSES), make_data())
    text = capsys.readouterr().out
    assert "4 of 4 training steps" in text
    assert "Note: 4 of 4 training steps ran exactly, not pipelined, because 'x' of the" in text
    assert "Verdict: would train, but exactly in each step" in text


def test_batches_of_graphs_are_micro_batches(capsys: Any) -> None:
    loader = torch.utils.data.DataLoader([draw_batch(SIZES)], batch_size=None)
    assert check(GraphModule(), loader)
    text = capsys.readouterr().out
    assert "Micro-batches are whole graphs" in text and "Verdict: would be pipelined." in text


def test_a_compiled_module_is_refused_in_words(capsys: Any) -> None:
    assert not check(torch.compile(make_module()), make_data())  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert "Expected a LightningModule (got one that torch.compile returned)" in text


HABITS = {
    "a script with `import pytorch_lightning`": (
        "refused: write `import lightning as L`",
        test_a_script_of_the_other_package_says_which_import_to_use,
    ),
}

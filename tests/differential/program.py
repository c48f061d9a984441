"""A draw as the text of a program: what runs is what is printed when it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.differential.nets import NetDraw, net_text

NUM_EPOCHS = 3
SLOTS = (
    "net_init",  # last in Net.__init__
    "forward_start",  # x as it is given
    "in_layer",  # h: the output of a layer, before norm and activation
    "forward_end",  # x: before the last linear layer
    "out",  # out: what forward returns; may be several lines
    "init",  # last in Module.__init__
    "step_start",  # x, edge_index, data: may be changed before the call
    "step_out",  # out: as the net returns it
    "loss",  # loss: may be changed
    "step_end",  # before training_step returns
    "methods",  # of Module
    "loaders",  # train, val: loaders
)


@dataclass(frozen=True)
class Habit:
    """What a user does, as lines at some places of the program."""

    name: str
    slots: Mapping[str, str] = field(default_factory=dict)  # lines by the name of their place
    trainer: str = ""  # arguments of the Trainer, such as `gradient_clip_val=0.1`
    optimizer: str = ""  # body of `configure_optimizers`, if it is another
    oracle: bool = True  # whether the oracle of stale rows does the same
    needs: frozenset[str] = frozenset()  # of the net: "tie", "alike", "edges alone" or "plain out"
    group: str = ""  # habits of one group do not go together


@dataclass(frozen=True)
class Setting:
    """Two ways to train that have to give the same: arguments of `results` for each."""

    name: str
    expected: str
    found: str


_EXACT = "[StalenessWarmup(1000)]"
_PIPED = "num_chunks=4, partition=torch.arange(NODES) % 4, staleness='constant'"
SETTINGS = {
    one.name: one
    for one in (
        Setting("one chunk", "", "GNNPipeStrategy(num_chunks=1)"),
        Setting("exact", "", f"GNNPipeStrategy(num_chunks=4), 1, {_EXACT}"),
        Setting("exact, two", "",
                f"GNNPipeStrategy(num_chunks=4, start_method='fork'), 2, {_EXACT}"),
        Setting("stale", "'auto', 1, [Oracle(4)]", f"GNNPipeStrategy({_PIPED})"),
        Setting("stale, two", "'auto', 1, [Oracle(4)]",
                f"GNNPipeStrategy({_PIPED}, start_method='fork'), 2"),
        Setting("one or two stages", "GNNPipeStrategy(num_chunks=4)",
                "GNNPipeStrategy(num_chunks=4, start_method='fork'), 2"),
        Setting("one or two stages, exact", f"GNNPipeStrategy(num_chunks=4), 1, {_EXACT}",
                f"GNNPipeStrategy(num_chunks=4, start_method='fork'), 2, {_EXACT}"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """A model, a graph and some habits."""

    seed: int
    net: NetDraw
    num_nodes: int
    habits: tuple[Habit, ...]

    @property
    def names(self) -> str:
        """The habits by name."""
        return ", ".join(habit.name for habit in self.habits) or "none"

    def settings(self) -> list[Setting]:
        """Return what to compare; one in five on two stages as well."""
        has_oracle = self.net.is_rowwise and all(habit.oracle for habit in self.habits)
        if self.net.dropout:  # a plain run draws other numbers
            names = ["one or two stages", "one or two stages, exact"][self.seed % 2 :][:1]
        else:
            names = ["one chunk", "exact", *(["stale"] if has_oracle else [])]
            if self.seed % 5 == 0:
                names.append("stale, two" if has_oracle else "exact, two")
        return [SETTINGS[name] for name in names]


_PROGRAM = '''"""Seed SEED. Habits: NAMES."""

import copy
from pathlib import Path
from tempfile import mkdtemp

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric import nn as gnn
from torch_geometric.data import Data

from lightning_gnnpipe import GNNPipeStrategy, StalenessWarmup

torch.set_default_dtype(torch.float64)


def make_graph(number=0):
    draw = torch.Generator().manual_seed(SEED + number)  # two nodes have no edge
    edge_index = torch.randint(0, NODES - 2, (2, 3 * NODES), generator=draw)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]].unique(dim=1)
    loops = torch.tensor([[0, 3], [0, 3]])
    edge_index = torch.cat([edge_index, loops, edge_index[:, :3]], 1)  # some are there twice
    node, num_edges = torch.arange(NODES), edge_index.size(1)
    return Data(
        x=torch.randn(NODES, 5, generator=draw), edge_index=edge_index,
        edge_weight=torch.rand(num_edges, generator=draw) + 0.5,
        edge_attr=torch.randn(num_edges, 3, generator=draw),
        y=torch.randint(0, 3, (NODES,), generator=draw),
        train_mask=node % 3 != 1, val_mask=node % 3 == 1, test_mask=node % 4 == 1,
    )


<<net>>


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.seen = {}
        <<init>>

    def see(self, name, value):
        self.seen.setdefault(name, []).append(torch.as_tensor(value).detach().double().clone())

    def training_step(self, data, batch_idx):
        x, edge_index = data.x, data.edge_index
        <<step_start>>
        out = self.net(ARGUMENTS)
        <<step_out>>
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        <<loss>>
        self.log("train_loss", loss, batch_size=1)
        <<step_end>>
        return loss

    def validation_step(self, data, batch_idx):
        x, edge_index = data.x, data.edge_index
        out = self.net(ARGUMENTS)
        <<step_out_of_validation>>
        loss = F.cross_entropy(out[data.val_mask], data.y[data.val_mask])
        self.log("val_loss", loss, batch_size=1)

    def configure_optimizers(self):
        <<optimizer>>

    <<methods>>


class Record(L.Callback):
    def __init__(self, folder):
        self.folder, self.steps = folder, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        step = f"step {len(self.steps)}"
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else 0.0
        found = self.steps[step] = {f"{step} loss": torch.as_tensor(loss).detach().clone()}
        for name, p in module.named_parameters():
            if p.numel():
                found[f"{step} weight {name}"] = p.detach().clone()
            if p.numel() and p.grad is not None:
                found[f"{step} gradient {name}"] = p.grad.detach().to_dense().clone()

    def on_train_end(self, trainer, module):
        found = {name: value for one in self.steps.values() for name, value in one.items()}
        found |= {f"seen {name}": torch.stack(one) for name, one in module.seen.items()}
        torch.save(found, f"{self.folder}/rank{trainer.global_rank}.pt")


def results(strategy="auto", devices=1, callbacks=()):
    """Return all that training gave, by name."""
    folder = mkdtemp(dir=Path(__file__).parent)
    L.seed_everything(7, verbose=False)
    module, graph = Module(), make_graph()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=EPOCHS,
        callbacks=[*callbacks, Record(folder)], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder, TRAINER
    )
    train = val = DataLoader([graph], batch_size=None)
    <<loaders>>
    trainer.fit(module, train, val)
    found = {}
    for path in sorted(Path(folder).glob("rank*.pt")):
        found |= torch.load(path)
    found |= {f"logged {n}": v.detach().double() for n, v in trainer.callback_metrics.items()}
    found |= {f"final {n}": v.detach().clone() for n, v in module.state_dict().items()}
    return found
'''


def text_of(draw: Draw) -> str:
    """Return the program, whose `results` trains once."""
    joined = {
        slot: "\n".join(one.slots[slot].strip("\n") for one in draw.habits if slot in one.slots)
        for slot in SLOTS
    }
    joined["step_out_of_validation"] = joined["step_out"]
    own = [habit.optimizer for habit in draw.habits if habit.optimizer]
    joined["optimizer"] = own[0] if own else "return torch.optim.SGD(self.parameters(), lr=0.1)"
    joined["net"] = net_text(draw.net)
    text = _PROGRAM
    for slot in ("net", *joined):  # the net has slots of its own
        text = fill(text, slot, joined[slot])
    values = {
        "SEED": str(draw.seed),
        "NAMES": draw.names,
        "EPOCHS": str(NUM_EPOCHS),
        "NODES": str(draw.num_nodes),
        "ARGUMENTS": ", ".join(["x, edge_index", *(f"data.{name}" for name in draw.net.extra)]),
        "TRAINER": ", ".join(habit.trainer for habit in draw.habits if habit.trainer),
    }
    for name, value in values.items():
        text = text.replace(name, value)
    return text + "\n"


def fill(text: str, slot: str, lines: str) -> str:
    """Return `text` with `lines` in place of a slot, as deep as the slot stands."""
    mark = f"<<{slot}>>"
    made = []
    for line in text.splitlines():
        if line.strip() != mark:
            made.append(line)
        elif lines:
            indent = line[: len(line) - len(line.lstrip())]
            made += [indent + one if one.strip() else "" for one in lines.splitlines()]
    return "\n".join(made)

"""num_stages="auto" with graph_parallel="auto": what is chosen, that it trains as it should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.engine.choice import LayoutChoice
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.models import GCN, NodeClassifier
from lightning_gnnpipe.options import StrategyOptions
from tests.helpers.graphs import communities
from tests.helpers.launch import FitResult, run_fit, run_plain
from tests.helpers.modules import GCNII, ReferenceModule
from tests.helpers.record import assert_steps_equal

NUM_STEPS = 4
SLOW = 1e-4  # Gbit/s: what is sent decides


class Watch(L.Callback):
    """Writes the layout that was chosen, and what was said of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "layout.pt"
        self.said: list[str] = []

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy.engine.choice.on_chosen = self.said.append

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        stats = trainer.strategy.collect_stats()
        if trainer.is_global_zero:
            torch.save(((stats.num_stages, stats.num_shards), self.said), self.path)

    def read(self) -> tuple[tuple[int, int], str]:
        layout, said = torch.load(self.path)
        return layout, " ".join(said)


def make(num_layers: int) -> ReferenceModule:
    module = ReferenceModule("gcnii", optimizer="momentum", weight_decay=0.05)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module.net = GCNII(num_layers).double()
    return module


def fit_both(
    num_layers: int, num_devices: int, tmp_path: Path, **options: Any
) -> tuple[FitResult, FitResult, tuple[int, int], str]:
    """Train in exact epochs, validation and clipping included, and under plain Lightning."""
    case, watch = communities(5), Watch(tmp_path)
    shared: dict[str, Any] = {
        "max_epochs": NUM_STEPS,
        "tmp_path": tmp_path,
        "trainer_kwargs": {
            "gradient_clip_val": 0.05,
            "limit_val_batches": 1.0,
            "num_sanity_val_steps": 2,  # the layout is chosen without gradients
        },
    }
    found = run_fit(
        make(num_layers),
        case.data,
        num_stages=0,
        num_devices=num_devices,
        num_chunks=case.num_chunks,
        partition=case.partition,
        callbacks=[StalenessWarmup(num_epochs=NUM_STEPS), watch],
        strategy_kwargs=options,
        **shared,
    )
    return found, run_plain(make(num_layers), case.data, **shared), *watch.read()


def assert_transparent(found: FitResult, plain: FitResult) -> None:
    assert_steps_equal(found.steps, plain.steps)
    for name, value in plain.state_dict.items():
        torch.testing.assert_close(found.state_dict[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("num_layers", "num_devices", "options", "layout", "text"),
    [
        (6, 3, {"link_gbit_per_s": SLOW}, (3, 1), "3 x 1 .*, 1 x 3 .*links of 0.0001 Gbit/s"),
        (2, 3, {}, (1, 3), "the only one possible"),  # measured, it would be the same
        (3, 4, {"link_gbit_per_s": SLOW}, (2, 2), "2 x 2 .*, 1 x 4 "),
    ],
)
def test_p1_a_chosen_layout_equals_plain_lightning(
    num_layers: int,
    num_devices: int,
    options: dict[str, Any],
    layout: tuple[int, int],
    text: str,
    tmp_path: Path,
) -> None:
    found, plain, chosen, said = fit_both(num_layers, num_devices, tmp_path, **options)
    assert chosen == layout
    assert_transparent(found, plain)
    assert said.startswith("Layout {} x {} (stages x shards), ".format(*layout))
    assert re.search(text, said), said


def test_only_what_fits_into_the_memory_is_chosen(tmp_path: Path) -> None:
    """Wide layers on a ring: shards hold all weights, four stages hold two of five layers."""
    num_nodes, width = 192, 64
    nodes = torch.arange(num_nodes)
    ring = Data(
        x=torch.rand(num_nodes, width),
        edge_index=torch.stack([nodes, (nodes + 1) % num_nodes]),
        y=nodes % 3,
    )
    options: dict[str, Any] = {
        "num_chunks": 4,
        "partition": "contiguous",
        "balance": "uniform",
        "start_method": "fork",
    }
    module = NodeClassifier(GCN(width, width, width, num_layers=5), width)
    data = FullGraphDataModule(ring)
    plan = GNNPipeStrategy(**options).plan(module, data, num_devices=4)
    hybrid, second, _ = sorted(plan.layouts, key=lambda one: one.memory_bytes)
    assert (hybrid.num_stages, hybrid.num_shards) == (2, 2)
    limit_gib = (hybrid.memory_bytes + second.memory_bytes) / 2 / 2**30

    def chosen(memory_gib: float) -> tuple[tuple[int, int], str]:
        watch = Watch(tmp_path)
        strategy = GNNPipeStrategy(graph_parallel="auto", memory_gib=memory_gib, **options)
        make_trainer(strategy, 4, watch).fit(module, datamodule=data)
        return watch.read()

    layout, text = chosen(limit_gib)
    assert layout == (2, 2)
    assert text.count("(needs 0.00") == 2
    layout, text = chosen(1e-6)
    assert layout == (2, 2)
    assert "None fits into 1e-06 GiB: this one needs least." in text


def make_trainer(
    strategy: GNNPipeStrategy, devices: int, *callbacks: L.Callback, epochs: int = 2
) -> L.Trainer:
    has_checkpoints = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_checkpointing=has_checkpoints,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class SharedNorm(nn.Module):
    """A norm with running statistics behind each layer: all of them must be in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.GCNConv(5, 5) for _ in range(4))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(conv(x, edge_index))
        return x


def test_layers_that_must_stay_together_are_not_cut_apart(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    options: dict[str, Any] = {"balance": "uniform", "link_gbit_per_s": SLOW}
    strategy = GNNPipeStrategy(graph_parallel="auto", start_method="fork", **options)
    trainer = make_trainer(strategy, 2, watch)
    data = communities(4).data
    data.x = data.x.float()
    trainer.fit(NodeClassifier(SharedNorm(), 5), datamodule=FullGraphDataModule(data))
    assert watch.read()[0] == (1, 2)


def fit(folder: Path, resume: Path | None = None, *, devices: int = 2, **options: Any) -> Any:
    """Train for four epochs, save each; return the last checkpoint and the choice."""
    folder.mkdir()
    watch = Watch(folder)
    saver = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    L.seed_everything(1 if resume is None else 2, verbose=False)
    case = communities(5)
    strategy = GNNPipeStrategy(
        graph_parallel="auto", partition=case.partition, start_method="fork", **options
    )
    trainer = make_trainer(strategy, devices, watch, saver, epochs=4)
    trainer.fit(make(4), datamodule=FullGraphDataModule(case.data), ckpt_path=resume)
    return torch.load(folder / "epoch=3.ckpt", weights_only=True), *watch.read()


@pytest.mark.parametrize(
    ("options", "layout"),
    [({"link_gbit_per_s": SLOW}, (2, 1)), ({"balance": [4]}, (1, 2))],
)
def test_p6_a_resumed_run_keeps_its_layout_and_equals_an_undisturbed_one(
    options: dict[str, Any],
    layout: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, chosen, _ = fit(tmp_path / "whole", **options)
    assert chosen == layout

    def measure(*args: Any) -> None:
        raise AssertionError("the layout is known")

    monkeypatch.setattr(LayoutChoice, "_measure", measure)
    found, again, text = fit(tmp_path / "second", tmp_path / "whole" / "epoch=1.ckpt")
    assert again == layout and text.endswith("as before.")
    torch.testing.assert_close(found["state_dict"], whole["state_dict"], rtol=0, atol=0)
    assert found["gnnpipe"]["run"] == whole["gnnpipe"]["run"]


def test_p6_another_number_of_devices_chooses_anew(tmp_path: Path) -> None:
    whole, *_ = fit(tmp_path / "whole", link_gbit_per_s=SLOW)
    saved = tmp_path / "whole" / "epoch=1.ckpt"
    found, layout, _ = fit(tmp_path / "second", saved, devices=3, link_gbit_per_s=SLOW)
    assert layout == (3, 1)
    torch.testing.assert_close(found["state_dict"], whole["state_dict"], rtol=0, atol=1e-10)


def options_of(**options: Any) -> StrategyOptions:
    return GNNPipeStrategy(**options).options


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({}, (6, 1)),
        ({"graph_parallel": 2}, (3, 2)),
        ({"num_stages": 2, "graph_parallel": "auto"}, (2, 3)),
        ({"balance": [3, 1, 2], "graph_parallel": "auto"}, (3, 2)),
        ({"history_device": "cpu", "graph_parallel": "auto"}, (6, 1)),
        ({"graph_parallel": "auto"}, None),
    ],
)
def test_what_is_settled_before_the_first_step(
    options: dict[str, Any], layout: tuple[int, int] | None
) -> None:
    assert options_of(**options).resolve_layout(6) == layout
    most = layout or (6, 6)
    assert options_of(**options).most_of_layout(6) == most
    engine = options_of(**options).for_engine(0, 6, is_fitting=True)
    assert engine.chunks.auto_chunks == 4 * most[0]


def test_one_device_leaves_no_choice() -> None:
    assert options_of(graph_parallel="auto").resolve_layout(1) == (1, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_stages": 4}, r"'num_stages' to divide the number of processes, 6 \(got 4\)"),
        ({"balance": [1] * 4}, r"'num_stages' to divide the number of processes, 6 \(got 4\)"),
        ({"num_stages": 2, "history_device": "cpu"}, "'history_device' to be None"),
        ({"graph_parallel": "all"}, r"'graph_parallel' to be at least 1, or 'auto' \(got all\)"),
        ({"link_gbit_per_s": 0}, "'link_gbit_per_s' to be positive"),
        ({"memory_gib": float("inf")}, "'memory_gib' to be positive"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        options_of(**{"graph_parallel": "auto", **options}).resolve_layout(6)


def test_more_devices_than_layers_and_nodes_are_refused(tmp_path: Path) -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    data = Data(x=torch.rand(2, 4), edge_index=edges, y=torch.tensor([0, 1]))
    module = NodeClassifier(GCN(4, 4, 2, num_layers=2), 2)
    strategy = GNNPipeStrategy(graph_parallel="auto", num_chunks=2, start_method="fork")
    with pytest.raises(Exception, match=r"deal 3 devices out.*2 layers that can be cut"):
        make_trainer(strategy, 3).fit(module, datamodule=FullGraphDataModule(data))

"""Bad input: a clear error on every rank, before work is lost, and every process ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe import GNNPipeStrategy
from lightning_gnnpipe.errors import ConfigError


class Net(nn.Module):
    def __init__(self, *convs: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs or [gnn.SAGEConv(4, 4), gnn.SAGEConv(4, 4)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


class Branches(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index) if x.max() > 0 else x


class Module(L.LightningModule):
    def __init__(self, net: nn.Module | None = None, calls: int = 1) -> None:
        super().__init__()
        self.net = Net() if net is None else net
        self.calls = calls
        self.optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = sum(self.net(data.x, data.edge_index) for _ in range(self.calls))
        if not self.calls:
            out = self.net.convs[0](data.x, data.edge_index)
        return F.cross_entropy(out, data.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=0.1)


class Tied(Module):
    """Has a weight of a layer of the pipeline behind it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.head.weight = self.net.convs[1].lin_l.weight


class TiedByName(Module):
    """Likewise; its name begins as that of the pipelined module."""

    def __init__(self) -> None:
        super().__init__()
        self.net_head = nn.Linear(4, 4)
        self.net_head.weight = self.net.convs[1].lin_l.weight


class Pruned(Module):
    """Has another parameter after its first epoch."""

    def on_train_epoch_end(self) -> None:
        for conv in self.net.convs:
            prune.identity(conv.lin_l, "weight")


class SharedNorm(nn.Module):
    """Layers of both stages count in the same running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(conv(x, edge_index))
        return x


class Witness(L.Trainer):
    """Writes the error of each rank, and lets no rank end the others before they have one."""

    folder: Path

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(*args, **kwargs)
        except Exception as error:
            path = self.folder / f"rank{self.global_rank}.txt"
            path.write_text(f"{type(error).__name__}: {error}")
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and self._count_written() < self.num_devices:
                time.sleep(0.01)
            raise

    def _count_written(self) -> int:
        return len(list(self.folder.glob("rank*.txt")))


def graph(**changes: Any) -> Data:
    generator = torch.Generator().manual_seed(0)
    data = Data(
        x=torch.randn(12, 4, generator=generator),
        edge_index=torch.randint(0, 12, (2, 40), generator=generator),
        y=torch.randint(0, 4, (12,), generator=generator),
    )
    return data.update(changes)


def fit(folder: Path, module: Module, data: Any, **options: Any) -> list[str]:
    """Train on two ranks and return what each of them ended with."""
    devices = options.pop("devices", 2)
    trainer = Witness(
        accelerator="cpu",
        devices=devices,
        strategy=GNNPipeStrategy(**{"num_chunks": 3, "start_method": "fork", **options}),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.folder = folder
    loader = data if isinstance(data, DataLoader) else DataLoader([data], collate_fn=first)
    with pytest.raises(Exception):  # noqa: B017 - of the process launcher; its text is below
        trainer.fit(module, loader)
    return [path.read_text() for path in sorted(folder.glob("rank*.txt"))]


def first(items: list[Data]) -> Data:
    return items[0]


def differs_by_rank(items: list[Data]) -> Data:
    data = items[0].clone()
    data.y = (data.y + torch.distributed.get_rank()) % 4
    return data


def with_lbfgs() -> Module:
    module = Module()
    module.optimizer = torch.optim.LBFGS
    return module


CASES: dict[str, tuple[Callable[[], Module], Callable[[], Any], dict[str, Any], str]] = {
    "features": (
        Module,
        lambda: graph(x=torch.randn(10, 4)),
        {},
        "name nodes from 0 to 9.*got node 11",
    ),
    "out-of-range": (
        Module,
        lambda: graph(edge_index=torch.tensor([[0, 99], [1, 2]])),
        {},
        "node 99",
    ),
    "negative": (Module, lambda: graph(edge_index=torch.tensor([[0, -1], [1, 2]])), {}, "node -1"),
    "float": (Module, lambda: graph(edge_index=torch.rand(2, 5)), {}, "hold integers.*float32"),
    "too-many-chunks": (Module, graph, {"num_chunks": 13}, "between 1 and the number of nodes, 12"),
    "no-message-passing": (lambda: Module(nn.Linear(4, 4)), graph, {}, "message-passing layers"),
    "untraceable": (lambda: Module(Branches()), graph, {}, "by torch.fx.*choose a smaller"),
    "two-forwards": (
        lambda: Module(calls=2),
        graph,
        {"graph_parallel": 2, "async_halo": True},
        "one pipelined forward before each backward",
    ),
    "no-forward": (
        lambda: Module(calls=0),
        graph,
        {},
        "training_step to call the pipelined module",
    ),
    "lbfgs": (with_lbfgs, graph, {}, "LBFGS"),
    "global-attention": (
        lambda: Module(Net(gnn.SAGEConv(4, 4), gnn.GPSConv(4, gnn.SAGEConv(4, 4)))),
        graph,
        {},
        "GPSConv.*attention runs over all nodes",
    ),
    "shared-norm": (
        lambda: Module(SharedNorm()),
        graph,
        {"balance": "uniform"},  # with one layer on a stage, the other has the norm alone
        "'norm', a BatchNorm1d, in stages .0, 1.",
    ),
    "unknown-conv": (
        lambda: Module(Net(gnn.PANConv(4, 4, 2))),
        graph,
        {},
        "'convs.0', a PANConv",
    ),
    "tied": (Tied, graph, {}, "'convs.1.lin_l.weight', which is also 'head.weight'"),
    "tied by name": (TiedByName, graph, {}, "which is also 'net_head.weight'"),
    "pruned": (Pruned, graph, {}, "no 'convs...lin_l.weight'"),
    "few-layers": (lambda: Module(Net(gnn.SAGEConv(4, 4))), graph, {}, "2 stages and 1 layers"),
    "batch-differs": (
        Module,
        lambda: DataLoader([graph()], collate_fn=differs_by_rank),
        {},
        "the same batch on every rank",
    ),
    "partition": (
        Module,
        graph,
        {"num_chunks": "auto", "partition": torch.zeros(5, dtype=torch.long)},
        "shape \\[12\\]",
    ),
    "wrong-name": (
        Module,
        graph,
        {"pipelined_module": "gnn"},
        "'pipelined_module' to name a submodule",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_on_every_rank(name: str, tmp_path: Path) -> None:
    make_module, make_data, options, text = CASES[name]
    found = fit(tmp_path, make_module(), make_data(), **options)
    assert len(found) == 2
    for one in found:
        assert re.search(text, one, re.DOTALL), one


def test_one_stage_may_have_what_several_may_not() -> None:
    for module in (Tied(), Pruned()):
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=GNNPipeStrategy(num_chunks=3),
            max_epochs=3,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader([graph()], collate_fn=first))
        assert trainer.current_epoch == 3


def test_the_world_must_fit(tmp_path: Path) -> None:
    found = fit(tmp_path, Module(), graph(), num_stages=3)
    assert all("'num_stages' to be 2 for 2 processes" in one for one in found)


def test_one_process_refuses_as_well(tmp_path: Path) -> None:
    [found] = fit(tmp_path, Module(), graph(edge_index=torch.rand(2, 5)), devices=1)
    assert "hold integers" in found


def test_zero_chunks_are_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match="'num_chunks' to be between 1 and the number of nodes"):
        GNNPipeStrategy(num_chunks=0)

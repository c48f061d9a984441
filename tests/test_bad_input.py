"""Bad input: a clear error on every rank, before work is lost, and every process ends."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe.datamodule import check_loader
from lightning_gnnpipe.errors import ConfigError, GraphError
from tests.helpers.engines import one_process_engine
from tests.helpers.trainers import quiet_trainer, weights
from tests.test_user_errors import D, Module, N, Net, fit, graph


class Pruned(Module):
    """Has another parameter after its first epoch."""

    def on_train_epoch_end(self) -> None:
        for conv in self.net.convs:
            prune.identity(conv.lin, "weight")


class WithLBFGS(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class LossOfRank(Module):
    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        return super().training_step(data, batch_idx) + self.global_rank


class SharedNorm(Net):
    """Layers of both stages count in the same running statistics."""

    def __init__(self) -> None:
        super().__init__(*(gnn.GCNConv(D, D) for _ in range(4)))
        self.norm = nn.BatchNorm1d(D)

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
            while time.monotonic() < deadline and len(self.written()) < self.num_devices:
                time.sleep(0.01)
            raise

    @classmethod
    def written(cls) -> list[Path]:
        return sorted(cls.folder.glob("rank*.txt"))


class Ragged(Module):
    """Draws pairs without a seed, for instance: as many as the rank, and four more."""

    def setup(self, stage: str) -> None:
        self.register_buffer("extra", torch.zeros(4 + self.global_rank))


def twice(net: Any, data: Data) -> Tensor:
    return net(data.x, data.edge_index) + net(data.x, data.edge_index)


def differs_by_rank(items: list[Data]) -> Data:
    data = items[0].clone()
    data.y = (data.y + torch.distributed.get_rank()) % D
    return data


DIFFERENT = DataLoader([graph()], collate_fn=differs_by_rank)
CASES: dict[str, tuple[Any, ...]] = {  # the text, the module, and what is not as usual
    "features": (
        r"name nodes from 0 to 9.*got node \d\d",
        Module,
        {"data": graph(x=torch.ones(10, D))},
    ),
    "two forwards": (
        "one pipelined forward before each backward",
        lambda: Module(None, twice),
        {"graph_parallel": 2, "async_halo": True},
    ),
    "optimizer": ("LBFGS", WithLBFGS),
    "loss": ("the same loss on every rank", LossOfRank),
    "shared norm": (
        "'norm', a BatchNorm1d, in stages .0, 1.",
        lambda: Module(SharedNorm()),
        {"balance": "uniform"},  # with one layer on a stage, the other has the norm alone
    ),
    "weights": ("same weights and buffers on all ranks .got different shapes of 'extra'", Ragged),
    "batch": ("the same batch on every rank", Module, {"data": DIFFERENT}),
}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_on_every_rank(name: str, tmp_path: Path) -> None:
    text, make, *unusual = CASES[name]
    usual = {"data": graph(), "num_chunks": 3, "start_method": "fork", "devices": 2}
    Witness.folder = tmp_path
    with pytest.raises(Exception):  # noqa: B017 - of the process launcher; its text is below
        fit(make(), kind=Witness, **{**usual, **dict(*unusual)})
    found = [path.read_text() for path in Witness.written()]
    assert len(found) == 2
    for one in found:
        assert re.search(text, one, re.DOTALL), one


def test_torchs_loader_of_graphs_is_refused_by_the_loaders_that_work() -> None:
    with pytest.raises(ConfigError, match=r"write DataLoader\(\[data\], batch_size=None\)"):
        fit(Module(), DataLoader([graph()]), 2)


def test_a_graph_in_place_of_a_loader_is_refused_by_what_serves_it() -> None:
    with pytest.raises(ConfigError, match=r"DataLoader\(\[data\], batch_size=None\), or datamod"):
        quiet_trainer(1, {"num_chunks": 2}, max_epochs=1).fit(Module(), graph())


class Logs(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[1](self.convs[0](x, edge_index), edge_index).relu()
        return self.convs[2](x.log(), edge_index)


class Diverges(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=torch.inf)


LOG = r"'log' at test_bad_input.py:\d+, `return self.convs\[2\]\(x.log\(\), edge_index\)` is -inf"
ONE = graph().x.clone()
ONE[3, 1] = torch.inf
NOT_FINITE: dict[str, tuple[Any, ...]] = {
    "an operation": (rf"epoch 0 is nan: the result of {LOG}\.\n.*\nKeep", lambda: Module(Logs())),
    "weights": (
        r"epoch 1 is nan: the output of layer 'convs.0', a GCNConv \(as is its 'bias'\), is",
        Diverges,
    ),
    "an argument": (
        r"epoch 0 is nan: 'x', which forward reads, is inf in row 3, column 1\.\n.*\nClean it",
        Module,
        graph(x=ONE),
    ),
    "the loss alone": (
        r"epoch 0 is nan, though all outputs of the network are finite\.\n.*\nIf a step may",
        Module,
        graph(train_mask=torch.zeros(N, dtype=torch.bool)),
    ),
}


@pytest.mark.filterwarnings("default:'x' is inf")
@pytest.mark.some_cases(2)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_loss_that_is_not_finite_ends_the_run_and_names_where_that_began(
    name: str, devices: int, tmp_path: Path
) -> None:
    text, make, *data = NOT_FINITE[name]
    Witness.folder = tmp_path
    with pytest.raises(Exception):  # noqa: B017 - as above
        fit(make(), *(data or [graph()]), 3, kind=Witness, devices=devices, start_method="fork")
    found = [path.read_text() for path in Witness.written()]
    assert len(found) == devices
    for one in found:
        assert re.search(f"^GNNPipeError: The loss of {text}", one), one


def test_a_loader_of_one_graph_is_looked_at_before_the_module_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, net = graph(x=ONE), Net().eval()
    with pytest.warns(UserWarning, match=r"^'x' is inf at node 3, column 1\. Unless"):
        check_loader(DataLoader([data], batch_size=None))
    monkeypatch.setattr("lightning_gnnpipe.steps.model.cut_module", lambda *_, **__: pytest.fail())
    engine = one_process_engine(net, num_chunks=N + 1, num_stages=2)  # and a validation comes first
    engine.options.given = replace(engine.options.given, balance="measured")
    with (
        engine.called_by("evaluation"),
        torch.no_grad(),
        pytest.raises(ConfigError, match=rf"between 1 and the number of nodes, {N} \(got {N + 1}"),
    ):
        engine.forward((data.x, data.edge_index), {})


@pytest.mark.parametrize(
    ("edges", "told"),
    [
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), r"'edge_index' to hold integers"),
        (torch.tensor([[0, 1], [1, N]]), rf"'edge_index' to name nodes from 0 to {N - 1}"),
    ],
)
def test_edges_are_looked_at_before_the_module_is_traced(edges: Tensor, told: str) -> None:
    engine = one_process_engine(Net().eval(), num_chunks=2)
    with (
        engine.called_by("evaluation"),
        torch.no_grad(),
        pytest.raises(GraphError, match=told),
    ):
        engine.forward((graph().x, edges), {})


def test_weights_may_be_renamed_on_two_stages() -> None:
    found = []
    for devices in (1, 2):
        torch.manual_seed(0)
        module = Pruned()
        fit(module, graph(), 3, devices=devices, start_method="fork")
        found.append(weights(module))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)

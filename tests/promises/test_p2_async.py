"""P2 with asynchronous and low-bit exchange, against oracles that know nothing of the engine."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe import BoundedStaleness, EmbeddingRefresh
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers import check_support
from tests.helpers.cases import slow
from tests.helpers.record import StatsRecorder
from tests.helpers.trainers import quiet_trainer

# Two communities, nodes 0-19 and 20-39, each a ring with chords; four edges join them.
HALF, D, NUM_LAYERS, LR, EPOCHS = 20, 5, 3, 0.2, 7


def graph() -> Data:
    generator = torch.Generator().manual_seed(3)
    pairs = [
        (first + i, first + (i + step) % HALF)
        for first in (0, HALF)
        for i in range(HALF)
        for step in (1, 2, 3)
    ]
    pairs += [(0, HALF), (5, HALF + 7), (9, HALF + 1), (13, HALF + 13)]
    return Data(
        x=torch.randn(2 * HALF, D, generator=generator, dtype=torch.float64),
        edge_index=torch.tensor([*pairs, *((b, a) for a, b in pairs)]).t().contiguous(),
        y=torch.randint(0, D, (2 * HALF,), generator=generator),
    )


def snapshots(number: int) -> list[Data]:
    """Return graphs with the same edges, and other features each."""
    return [graph().update({"x": graph().x * factor}) for factor in range(1, number + 1)]


class Net(nn.Module):
    """Sums of neighbours' rows, or the largest, between linear layers."""

    def __init__(self, aggr: str = "sum") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lins = nn.ModuleList([nn.Linear(D, D) for _ in range(NUM_LAYERS)])
        self.conv = nn.ModuleList([gnn.SimpleConv(aggr=aggr) for _ in range(NUM_LAYERS)])
        self.double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for lin, conv in zip(self.lins, self.conv, strict=True):
            x = x + 0.3 * torch.tanh(conv(lin(x), edge_index))
        return x


class Module(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Data, _: int) -> Tensor:
        return F.cross_entropy(self.net(batch.x, batch.edge_index), batch.y)

    def validation_step(self, batch: Data, _: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch.x, batch.edge_index), batch.y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def oracle(synchronous: list[bool], num_inputs: int = 1) -> Tensor:
    """Return the weights after all epochs; some use what the other half had an epoch ago.

    That is its rows, and the gradients of its sums; matrices are dense.
    """
    data, net = graph(), Net()
    inputs = [one.x for one in snapshots(num_inputs)]
    dense = torch.zeros(2 * HALF, 2 * HALF, dtype=torch.float64)
    dense[data.edge_index[1], data.edge_index[0]] = 1.0
    same = (torch.arange(2 * HALF)[:, None] < HALF) == (torch.arange(2 * HALF)[None] < HALF)
    near, far = dense * same, dense * ~same
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    last: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by input
    for is_synchronous, number in product(synchronous, range(num_inputs)):
        x, received, present = inputs[number], torch.zeros(()), []
        for layer, lin in enumerate(net.lins):
            rows = lin(x)
            if is_synchronous:
                sums = dense @ rows
            else:
                old_rows, old_grad = last[number][layer]
                sums = near @ rows + far @ old_rows
                received = received + (rows * (far.t() @ old_grad)).sum()
            sums.retain_grad()
            present.append((rows, sums))
            x = x + 0.3 * torch.tanh(sums)
        optimizer.zero_grad()
        (F.cross_entropy(x, data.y) + received).backward()
        optimizer.step()
        last[number] = [(rows.detach(), sums.grad) for rows, sums in present]
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def fit(
    tmp_path: Path,
    *callbacks: L.Callback,
    net: nn.Module | None = None,
    num_stages: int = 1,
    validates: bool = False,
    num_inputs: int = 1,
    **piped: Any,
) -> tuple[Tensor, dict[str, int]]:
    """Return the weights, and the bytes of the last step by kind."""
    module = Module(net or Net())
    trainer = quiet_trainer(
        2 * num_stages,
        {"num_stages": num_stages, "graph_parallel": 2, "num_chunks": 1, **piped},
        max_epochs=EPOCHS,
        callbacks=[*callbacks, StatsRecorder(tmp_path)],
        limit_val_batches=1 if validates else 0,
    )
    loader = DataLoader(snapshots(num_inputs), batch_size=None)
    trainer.fit(module, loader, loader if validates else None)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return weights, torch.load(tmp_path / "bytes.pt")[-1]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("every", [0, 3])
def test_p2_asynchronous_shards_equal_the_oracle(every: int, tmp_path: Path) -> None:
    callbacks = [BoundedStaleness(sync_every_n_epochs=every)] if every else []
    synchronous = [e == 0 or bool(every and (e + 1) % every == 0) for e in range(EPOCHS)]
    found, _ = fit(tmp_path, *callbacks, async_halo=True)
    torch.testing.assert_close(found, oracle(synchronous), rtol=1e-10, atol=1e-10)
    two, _ = fit(tmp_path, *callbacks, num_inputs=2, async_halo=True)  # each with its own last rows
    torch.testing.assert_close(two, oracle(synchronous, 2), rtol=1e-10, atol=1e-10)
    if not every:  # and validation between the steps changes nothing
        validated, _ = fit(tmp_path, validates=True, async_halo=True)
        assert torch.equal(validated, found)


def test_p5_bytes_of_the_halo_are_those_of_the_formula(tmp_path: Path) -> None:
    rows = 4  # that each half reads of the other: four edges join them, no node has two
    sizes = {
        "fp32": rows * D * 8,
        "bf16": rows * D * 2,
        "int1": rows * 4 + 3,
        "int8": rows * (4 + D),
    }
    for codec in [*sizes, ("int1", "bf16")]:
        forward, backward = (codec, codec) if isinstance(codec, str) else codec
        _, found = fit(tmp_path, halo_codec=codec)
        assert found["halo"] == 2 * NUM_LAYERS * sizes[forward], codec
        assert found["halo_grad"] == 2 * NUM_LAYERS * sizes[backward], codec


@pytest.mark.parametrize("aggr", [slow("sum"), "max"])
def test_activations_computed_again_are_the_same_in_asynchronous_chunks(
    aggr: str, tmp_path: Path
) -> None:
    found, expected = (
        fit(
            tmp_path,
            EmbeddingRefresh(3),
            net=Net(aggr),
            num_chunks=3,
            async_halo=True,
            recompute=recompute,
        )[0]
        for recompute in (True, False)
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        slow({"async_halo": True}),
        {"async_halo": True, "recompute": True},
        slow({"history_dtype": torch.bfloat16}),
        {"async_halo": True, "history_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_p3_stale_shards_do_not_depend_on_stages(options: dict[str, Any], tmp_path: Path) -> None:
    expected, _ = fit(tmp_path, num_chunks=3, **options)
    found, _ = fit(tmp_path, num_stages=2, num_chunks=3, **options)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Mixes(nn.Module):
    """Looks at all nodes outside of message passing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = gnn.GCNConv(D, D), gnn.GCNConv(D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(x, edge_index)
        return self.last(x - x.max(0).values, edge_index)


def test_p4_what_mixes_rows_is_refused_on_shards_of_one_chunk(tmp_path: Path) -> None:
    with pytest.raises(mp.ProcessRaisedException, match="UnsupportedError"):
        fit(tmp_path, net=Mixes().double())
    with pytest.raises(UnsupportedError, match="num_chunks=1 and graph_parallel=1"):
        check_support(gnn.GPSConv(D, gnn.GCNConv(D, D)), num_chunks=1, num_shards=2)

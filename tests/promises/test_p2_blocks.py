"""P2 for gradients in blocks: they equal the oracle's, on every path that they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data

from lightning_gnnpipe import BlockGradients, LastRows, StalenessMethod, StalenessWarmup
from lightning_gnnpipe.graph import chunk_order
from lightning_gnnpipe.types import OrderName
from tests.helpers.block_oracle import BlockOracle, train_in_blocks
from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES, GraphCase, all_cases, communities
from tests.helpers.launch import SEED, run_fit
from tests.helpers.modules import NETS, ReferenceModule
from tests.helpers.record import assert_steps_equal

NUM_EPOCHS = 6
OPTIMIZER = {"optimizer": "momentum", "lr": 0.05}
SIZES = {  # layers of each block
    ("gcn", 1): [4],
    ("gcn", 2): [2, 2],
    ("gcn", 3): [1, 1, 2],
    ("gcn", 9): [1, 1, 1, 1],
    **{("gcnii", blocks): sizes for blocks, sizes in ((1, [4]), (2, [2, 2]), (9, [1, 1, 1, 1]))},
    ("gcnii", 3): [1, 1, 2],
    ("tied", 2): [2, 2],
    ("tied", 3): [1, 1, 2],
    **{
        (name, blocks): sizes
        for name in ("sage", "gat_jk", "edge", "several")
        for blocks, sizes in ((1, [3]), (2, [1, 2]), (3, [1, 1, 1]), (9, [1, 1, 1]))
    },
}


def assert_equals_oracle(
    case: GraphCase,
    tmp_path: Path,
    *,
    name: str,
    num_blocks: int,
    lookahead: int = 2,
    order: OrderName = "shuffled",
    num_warmup: int = 1,
    kind: type[ReferenceModule] = ReferenceModule,
    num_stages: int = 1,
    num_shards: int = 1,
    **options: Any,
) -> None:
    callbacks: list[L.Callback] = [StalenessWarmup(num_warmup)] if num_warmup > 1 else []
    found = run_fit(
        kind(name, **OPTIMIZER),
        case.data,
        num_stages=num_stages,
        num_shards=num_shards,
        num_chunks=case.num_chunks,
        partition=case.partition,
        callbacks=callbacks,
        max_epochs=NUM_EPOCHS,
        tmp_path=tmp_path,
        trainer_kwargs={"limit_val_batches": 0},
        strategy_kwargs={
            "staleness": StalenessMethod(BlockGradients(num_blocks), LastRows(), lookahead),
            "chunk_order": order,
            **options,
        },
    )
    module = kind(name, **OPTIMIZER)
    oracle = BlockOracle(name, module.net, case.partition, SIZES[name, num_blocks], lookahead)
    expected = train_in_blocks(
        module,
        case.data,
        oracle,
        orders=lambda epoch: chunk_order(case.num_chunks, epoch=epoch, seed=SEED, order=order),
        exact_epochs=range(num_warmup if case.num_chunks > 1 else NUM_EPOCHS),
        num_epochs=NUM_EPOCHS,
    )
    assert_steps_equal(found.steps, expected)


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 9])
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@pytest.mark.parametrize("name", NETS)
def test_one_stage_equals_oracle(
    name: str, num_chunks: int, num_blocks: int, lookahead: int, tmp_path: Path
) -> None:
    assert_equals_oracle(
        communities(num_chunks), tmp_path, name=name, num_blocks=num_blocks, lookahead=lookahead
    )


@pytest.mark.parametrize("order", ["fixed", "mirrored"])
@pytest.mark.parametrize("name", NETS)
def test_any_order_equals_oracle(name: str, order: OrderName, tmp_path: Path) -> None:
    assert_equals_oracle(communities(5), tmp_path, name=name, num_blocks=2, order=order)


@pytest.mark.parametrize("name", ["gcn", "gat_jk", "edge"])
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_one_stage_equals_oracle_on(case: GraphCase, name: str, tmp_path: Path) -> None:
    assert_equals_oracle(case, tmp_path, name=name, num_blocks=2)


@pytest.mark.parametrize("name", NETS)
def test_what_waits_is_dropped_by_exact_steps(name: str, tmp_path: Path) -> None:
    assert_equals_oracle(communities(5), tmp_path, name=name, num_blocks=3, num_warmup=3)


class Several(nn.Module):
    """Passes messages several times in a layer, of which all or none are used again."""

    def __init__(self) -> None:
        super().__init__()
        convs = [
            gnn.TAGConv(NUM_FEATURES, 6, K=3),
            gnn.MixHopConv(6, 2, powers=[0, 1, 2]),
            gnn.APPNP(K=3, alpha=0.2),
        ]
        self.convs = nn.ModuleList(convs)
        self.lin = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index).relu()
        x = self.convs[1](x, edge_index).relu()
        return self.lin(self.convs[2](x, edge_index))


class OfSeveral(ReferenceModule):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__("gcn", **options)
        torch.manual_seed(1)
        self.net = Several().double()


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "num_shards", "recompute"),
    [(1, 1, 1, False), (2, 1, 1, True), (2, 2, 1, False), (3, 1, 2, False)],
)
def test_layers_that_pass_messages_several_times(
    num_blocks: int, num_stages: int, num_shards: int, recompute: bool, tmp_path: Path
) -> None:
    assert_equals_oracle(
        communities(5),
        tmp_path,
        name="several",
        num_blocks=num_blocks,
        num_stages=num_stages,
        num_shards=num_shards,
        recompute=recompute,
        kind=OfSeveral,
    )


class Tied(nn.Module):
    """The layers but the first have the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = gnn.GCNConv(NUM_FEATURES, 6)
        self.conv = gnn.GATConv(6, 6)
        self.lin = nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        x = x + self.conv(x, edge_index).relu()
        x = x + self.conv(x, edge_index).relu()
        return self.lin(x + self.conv(x, edge_index).relu())


class OfTied(ReferenceModule):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__("gcn", **options)
        torch.manual_seed(1)
        self.net = Tied().double()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_weights_of_several_blocks_are_carried_on_average(
    num_blocks: int, num_stages: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_blocks": num_blocks, "num_stages": num_stages, "kind": OfTied}
    assert_equals_oracle(communities(5), tmp_path, name="tied", **options)


class Outside(ReferenceModule):
    """Has a layer in front of the pipelined module, and one whose weights are frozen in it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        torch.manual_seed(1)
        self.first = nn.Linear(NUM_FEATURES, NUM_FEATURES).double()
        self.net.convs[1].requires_grad_(False)

    def net_inputs(self, data: Data) -> list[Tensor]:
        x, *others = super().net_inputs(data)
        return [self.first(x), *others]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["gcn", "edge"])
def test_a_batch_that_needs_a_gradient(name: str, num_stages: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_blocks": 2, "num_stages": num_stages, "kind": Outside}
    assert_equals_oracle(communities(5), tmp_path, name=name, **options)


@pytest.mark.parametrize(
    ("name", "num_stages", "num_shards", "num_blocks", "options"),
    [
        ("gcn", 2, 1, 2, {}),  # stages are blocks
        ("gcn", 4, 1, 4 + 5, {}),
        ("gcnii", 4, 1, 2, {}),  # two stages share a block
        ("gcnii", 2, 1, 9, {}),  # a stage has two blocks
        ("gat_jk", 3, 1, 2, {}),
        ("edge", 2, 1, 3, {}),
        ("gcn", 2, 1, 3, {"balance": [3, 1]}),  # a stage ends within a block
        ("gcnii", 3, 1, 1, {}),
        ("sage", 3, 1, 3, {"recompute": True}),
        ("gcn", 1, 1, 2, {"recompute": True}),
        ("edge", 1, 1, 2, {"recompute": True}),
        ("gat_jk", 2, 1, 2, {"recompute": True}),
        ("gcnii", 2, 1, 2, {"history_device": "cpu"}),
        ("gcn", 1, 2, 2, {}),
        ("sage", 1, 3, 3, {}),
        ("gat_jk", 1, 2, 2, {}),
        ("edge", 2, 2, 2, {}),
        ("gcnii", 2, 2, 2, {"recompute": True}),
    ],
)
def test_stages_shards_and_recomputing_equal_oracle(
    name: str,
    num_stages: int,
    num_shards: int,
    num_blocks: int,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    assert_equals_oracle(
        communities(5),
        tmp_path,
        name=name,
        num_blocks=num_blocks,
        num_stages=num_stages,
        num_shards=num_shards,
        **options,
    )

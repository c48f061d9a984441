"""P5: the bytes that are measured are those of the formula, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule
from lightning_gnnpipe.models import GCNII, GNN, NodeClassifier
from lightning_gnnpipe.planning.closed_forms import graph_parallel_bytes, pipeline_bytes
from lightning_gnnpipe.types import CodecOption, RepeatOption
from tests.helpers.cases import slow
from tests.helpers.encoders import WIDTH, EdgeEncoded
from tests.helpers.graphs import NUM_CLASSES, NUM_EDGE_FEATURES, NUM_FEATURES, communities
from tests.helpers.record import StatsRecorder
from tests.helpers.trainers import quiet_trainer

N, F, D, C = 37, NUM_FEATURES, 8, NUM_CLASSES
FLOAT = 4


class EdgeClassifier(NodeClassifier):
    def forward(self, data: Data) -> Tensor:
        return self.net(data.x, data.edge_index, data.edge_attr)


def graph() -> Data:
    data = communities(5, N).data
    data.x, data.edge_attr = data.x.float(), data.edge_attr.float()
    return data


def measure(
    folder: Path,
    net: nn.Module,
    num_stages: int,
    num_chunks: int,
    num_shards: int = 1,
    data: Data | None = None,
    num_classes: int = C,
    **piped: Any,
) -> list[dict[str, int]]:
    """Return the bytes of three steps."""
    kind = EdgeClassifier if isinstance(net, EdgeEncoded) else NodeClassifier
    trainer = quiet_trainer(
        num_stages * num_shards,
        {"num_chunks": num_chunks, "graph_parallel": num_shards, **piped},
        max_epochs=3,
        callbacks=[StatsRecorder(folder)],
    )
    trainer.fit(kind(net, num_classes), datamodule=FullGraphDataModule(data or graph()))
    steps: list[dict[str, int]] = torch.load(folder / "bytes.pt")
    assert len(steps) == 3
    return steps


def gradient_bytes(net: nn.Module) -> int:
    """Return the bytes of the gradients of all weights, with a number for each: there or None."""
    return sum(p.numel() + 1 for p in net.parameters()) * FLOAT


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "repeat"),
    [
        (2, 1, False),
        (2, 5, True),
        (3, 7, False),
        (1, 4, True),
        slow(2, 1, True),
        slow(2, 5, False),
        slow(3, 7, True),
        slow(1, 4, False),
    ],
)
def test_p5_bytes_equal_the_formula(
    num_stages: int, num_chunks: int, repeat: bool, tmp_path: Path
) -> None:
    """GCNII: X and X_0 cross each cut, or X alone where each stage computes X_0 again.

    The first step is exact, the others are not.
    """
    net = GCNII(F, D, C, num_layers=4)
    steps = measure(tmp_path, net, num_stages, num_chunks, repeat_encoder=repeat)
    row_bytes = (D if repeat else 2 * D) * FLOAT
    crossing = 2 * (num_stages - 1) * N * row_bytes
    outputs = (num_stages - 1) * N * C * FLOAT
    # weight and bias of the encoder
    tied = repeat * gradient_bytes(net.lin_in) if num_stages > 1 else 0
    weights = gradient_bytes(net)
    for step in steps:
        assert step.get("forward", 0) == step.get("backward", 0) == crossing // 2
        assert step.get("output", 0) == outputs
        assert step.get("weight_grad", 0) == (num_stages - 1) * (weights + tied)
        assert not step.keys() - {"forward", "backward", "output", "weight_grad", "control"}
    assert crossing + outputs + (num_stages - 1) * (weights + tied) == pipeline_bytes(
        num_nodes=N,
        row_bytes=[row_bytes] * (num_stages - 1),
        output_row_bytes=C * FLOAT,
        weight_bytes=weights,
        tied_bytes=tied,
    )


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("codec", "forward", "backward"),
    [
        ("bf16", N * 2 * D, N * 2 * D),
        ("int8", N * (4 + D), N * (4 + D)),
        (("int8", "bf16"), N * (4 + D), N * 2 * D),
        (("fp32", "int1"), N * 4 * D, N * (4 + D // 8)),
    ],
)
def test_p5_codecs_count_at_cuts(
    codec: CodecOption, forward: int, backward: int, tmp_path: Path
) -> None:
    exact, *others = measure(tmp_path, GNN(F, D, C, num_layers=4), 2, 5, cut_codec=codec)
    assert exact["forward"] == exact["backward"] == N * D * FLOAT
    for step in others:
        assert (step["forward"], step["backward"]) == (forward, backward)


@pytest.mark.parametrize("repeat", ["auto", False])
def test_p5_edge_features_count_by_edge(repeat: RepeatOption, tmp_path: Path) -> None:
    """Layers read encoded edge features: they cross the cut with one row an edge."""
    [*_, step] = measure(tmp_path, EdgeEncoded(), 2, 4, repeat_encoder=repeat)
    edges = 0 if repeat else graph().num_edges
    assert step["forward"] == step["backward"] == (N + edges) * WIDTH * FLOAT
    assert step["output"] == N * C * FLOAT
    net = EdgeEncoded()
    encoder = (NUM_EDGE_FEATURES * WIDTH + WIDTH + 2) * FLOAT if repeat else 0
    assert step["weight_grad"] == gradient_bytes(net) + encoder


class Late(GCNII):
    """Reads X_0 in the last layer alone: only the last of three stages computes it again."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x_0 = self.lin_in(self.dropout(x)).relu()
        for conv in self.convs[:-1]:
            x = conv(self.dropout(x), x, edge_index).relu()
        x = self.convs[-1](self.dropout(x), x_0, edge_index).relu()
        return self.lin_out(self.dropout(x))


def test_p5_gradients_of_weights_on_stages_and_shards(tmp_path: Path) -> None:
    """Shards sum the gradients of their stage, then each shard gets those of other stages."""
    net = Late(F, D, C, num_layers=3)
    [*_, step] = measure(tmp_path, net, 3, 4)
    assert step["forward"] == step["backward"] == 2 * N * D * FLOAT
    assert step["weight_grad"] == 2 * gradient_bytes(net) + gradient_bytes(net.lin_in)
    net = GNN(F, D, C, num_layers=4)
    [*_, step] = measure(tmp_path, net, 2, 4, num_shards=2)
    assert step["forward"] == step["backward"] == N * D * FLOAT
    assert step["weight_grad"] == 2 * gradient_bytes(net) + 2 * gradient_bytes(net)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("num_shards", [2, 3])
def test_p5_graph_parallel_bytes_equal_the_formula(num_shards: int, tmp_path: Path) -> None:
    num_layers = 3
    net, data = GNN(F, D, D, num_layers), graph()
    # Every node has edges from all others, so that each shard reads all rows of the others.
    data.edge_index = torch.cartesian_prod(torch.arange(N), torch.arange(N)).t()
    del data.edge_attr, data.edge_weight
    weight_bytes = gradient_bytes(net)
    for step in measure(tmp_path, net, 1, 1, num_shards, data, num_classes=D):
        assert step["halo"] == step["halo_grad"] == num_layers * (num_shards - 1) * N * D * FLOAT
        assert step["weight_grad"] == 2 * (num_shards - 1) * weight_bytes
        assert step["output"] == (num_shards - 1) * N * D * FLOAT
        assert step["halo"] + step["halo_grad"] + step["weight_grad"] == graph_parallel_bytes(
            num_layers=num_layers,
            replicas_per_node=num_shards - 1,
            num_nodes=N,
            row_bytes=D * FLOAT,
            weight_bytes=weight_bytes,
            num_shards=num_shards,
        )

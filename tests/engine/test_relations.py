"""HANConv and HGTConv, which take and return dicts: models as users write them, all switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers import check_support
from lightning_gnnpipe.staleness import StalenessMethod
from tests.helpers.engines import one_process_engine
from tests.helpers.reference import StaleOracle

pytestmark = pytest.mark.usefixtures("double")

N, D = 26, 8
CHUNKS = torch.arange(N) * 7 % N // 9
RELATIONS = [("a", "cites", "a"), ("a", "likes", "a")]
KINDS = [gnn.HANConv, gnn.HGTConv]


def edges(count: int, stride: int) -> Tensor:
    number = torch.arange(count)
    source = (number * stride + number // 7) % (N - 1)
    return torch.stack([source, (number * 5 + number // 3 + stride) % (N - 2)])


class Net(nn.Module):
    """Three layers of one kind; what they return goes on as a dict, or is taken apart."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList(kind(D, D, (["a"], RELATIONS), heads=2) for _ in range(3))

    def forward(self, x: Tensor, cites_edge_index: Tensor, likes_edge_index: Tensor) -> Tensor:
        sets = dict(zip(RELATIONS, (cites_edge_index, likes_edge_index), strict=True))
        first, second, third = self.convs
        x_dict = second(first({"a": x}, sets), sets)
        x_dict = {key: rows.tanh() for key, rows in x_dict.items()}
        return third(x_dict, edge_index_dict=sets)["a"]


class WithDicts(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        return self.net(x_dict["a"], *edge_index_dict.values())


def make_batch(num_likes: int = 44) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(N, D), edges(61, 11), edges(num_likes, 3)


def move(net: nn.Module, size: float) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            moves = torch.sin(torch.arange(parameter.numel()) + number)
            parameter += size * moves.view_as(parameter)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return found


def assert_same(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_likes", [44, 61])
@pytest.mark.parametrize("kind", KINDS)
def test_p1_dicts_train_as_in_pyg(kind: Any, num_likes: int) -> None:
    """An exact step equals plain PyG, a step in chunks behind it and inference do as well."""
    x, *sets = make_batch(num_likes)
    net = WithDicts(Net(kind))
    given = {"x_dict": {"a": x}, "edge_index_dict": dict(zip(RELATIONS, sets, strict=True))}
    check_support(net, num_chunks=3)
    engine = one_process_engine(net, partition=CHUNKS)
    expected = net(**given)
    expected.square().sum().backward()
    expected_grads = gradients(net)
    for step in range(2):
        engine.set_step(step_index=step)
        found = engine.forward((), given)
        assert_same(found.detach(), expected.detach())
        found.square().sum().backward()
        if step == 0:
            assert_same(gradients(net), expected_grads)
    with torch.no_grad():
        assert_same(engine.forward((), given), expected.detach())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_p2_stale_steps_equal_the_oracle(kind: Any, recompute: bool) -> None:
    batch = make_batch()
    net = Net(kind)
    oracle = StaleOracle(net, CHUNKS, cross_chunk_grad_scale=2.0)
    engine = one_process_engine(
        net,
        partition=CHUNKS,
        chunk_order="fixed",
        method=StalenessMethod(linear_scale=2.0, message_scale=2.0),
        recompute=recompute,
    )
    for step in range(4):
        chunked = oracle.chunked(*batch, order=(0, 1, 2)) if step else oracle.exact(*batch)
        chunked.square().sum().backward()
        expected_grads = gradients(net)
        engine.set_step(step_index=step)
        found = engine.forward(batch, {})
        assert_same(found.detach(), chunked.detach())
        found.square().sum().backward()
        assert_same(gradients(net), expected_grads)
        move(net, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_in_histories_and_by_autocast(kind: Any) -> None:
    batch = make_batch()
    net = Net(kind).float()
    given = (batch[0].float(), *batch[1:])
    engine = one_process_engine(net, partition=CHUNKS, history_dtype=torch.bfloat16)
    for step in range(3):
        engine.set_step(step_index=step)
        with torch.autocast("cpu", torch.bfloat16, enabled=step == 2):
            found, expected = engine.forward(given, {}), net.forward(*given)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
        found.float().sum().backward()


def test_shares_of_a_mean_are_kept_a_chunk_not_a_node() -> None:
    batch = make_batch()
    net = Net(gnn.HANConv)
    engine = one_process_engine(net, partition=CHUNKS)
    engine.forward(batch, {}).sum().backward()
    store = engine.graphs.trained.store
    sizes = {k.argument: store.rows(k).shape for k in store if k.layer.endswith("0")}
    assert sizes == {"x": (N, 2, D // 2), "alpha": (N, 2), "statistics": (3, 2, D)}


class Module(L.LightningModule):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net = Net(kind)

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        out = self.net(data.x, data.cites_edge_index, data.likes_edge_index)
        return (out - data.x.roll(1, 0)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_p3_two_stages_train_as_one(tmp_path: Path, kind: Any) -> None:
    x, cites, likes = make_batch()
    data = FullGraphDataModule(Data(x=x, cites_edge_index=cites, likes_edge_index=likes))
    weights = []
    for num_stages in (1, 2):
        L.seed_everything(1, verbose=False)
        module = Module(kind)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=num_stages,
            strategy=GNNPipeStrategy(num_chunks=4, start_method="fork", balance="uniform"),
            max_epochs=4,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, datamodule=data)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert_same(*weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forecast_of_layers_that_take_dicts(kind: Any) -> None:
    x, cites, likes = make_batch()
    data = FullGraphDataModule(Data(x=x, cites_edge_index=cites, likes_edge_index=likes))
    plan = GNNPipeStrategy(num_chunks=4).plan(Module(kind), data, num_stages=2)
    assert plan.num_edges == 61 + 44


@pytest.mark.parametrize("kind", KINDS)
def test_p4_several_types_of_nodes_are_refused(kind: Any) -> None:
    conv = kind(D, D, (["a", "b"], [("a", "to", "b"), ("b", "to", "a")]))
    with pytest.raises(UnsupportedError, match=f"{kind.__name__}: .*several types.*RGCNConv"):
        check_support(nn.ModuleList([conv]), num_chunks=2)


def test_weights_of_edge_sets_can_be_used_in_forward() -> None:
    """HANConv returns them on request; they are as stale as the rows that they come from."""

    class Weighted(Net):
        def forward(self, x: Tensor, cites_edge_index: Tensor, likes_edge_index: Tensor) -> Tensor:
            sets = dict(zip(RELATIONS, (cites_edge_index, likes_edge_index), strict=True))
            out, weight = self.convs[0]({"a": x}, sets, return_semantic_attention_weights=True)
            return out["a"] * weight["a"][0]

    net, batch = Weighted(gnn.HANConv), make_batch()
    engine = one_process_engine(net, partition=CHUNKS)
    for step in range(3):
        engine.set_step(step_index=step)
        found = engine.forward(batch, {})
        assert_same(found.detach(), net.forward(*batch).detach())
        found.sum().backward()

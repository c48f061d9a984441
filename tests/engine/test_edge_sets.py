"""Several edge sets over the same nodes: models as users write them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.errors import GraphError, UnsupportedError
from lightning_gnnpipe.layers import check_support
from tests.helpers.engines import one_process_engine

pytestmark = pytest.mark.usefixtures("double")

N, D = 26, 8
CHUNKS = torch.arange(N) * 7 % N // 9
ONE_CHUNK = torch.zeros(N, dtype=torch.int64)


def edges(count: int, stride: int) -> Tensor:
    number = torch.arange(count)
    source = (number * stride + number // 7) % (N - 1)
    return torch.stack([source, (number * 5 + number // 3 + stride) % (N - 2)])


def make_batch(num_neg: int = 44) -> dict[str, Tensor]:
    return {
        "x": torch.randn(N, D),
        "pos_edge_index": edges(61, 11),
        "neg_edge_index": edges(num_neg, 3),
        "pos_edge_weight": torch.rand(61) + 0.5,
        "neg_edge_weight": torch.rand(num_neg) + 0.5,
    }


class Signed(nn.Module):
    """What PyG's SignedGCN does."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(D, True), (D // 2, False), (D // 2, False)]
        self.convs = nn.ModuleList(gnn.SignedConv(width, D // 2, one) for width, one in widths)

    def forward(self, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, pos_edge_index, neg_edge_index).relu()
        return x


class Weighted(nn.Module):
    """One kind of layer for each edge set, weights that are changed on the way, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.ModuleList(gnn.GCNConv(D, D) for _ in range(3))
        self.neg = nn.ModuleList(gnn.GATConv(D, D, edge_dim=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(D) for _ in range(3))
        self.score = nn.Linear(1, 1)

    def forward(
        self,
        x: Tensor,
        pos_edge_index: Tensor,
        neg_edge_index: Tensor,
        pos_edge_weight: Tensor,
        neg_edge_weight: Tensor,
    ) -> Tensor:
        score = self.score(neg_edge_weight[:, None]).sigmoid()  # crosses the cuts
        for pos, neg, norm in zip(self.pos, self.neg, self.norms, strict=True):
            x = pos(x, pos_edge_index, pos_edge_weight) - neg(x, neg_edge_index, score)
            x = norm(x).tanh()
        return x


class Relations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = {"pos": gnn.GATConv, "neg": gnn.GCNConv}
        self.convs = nn.ModuleList(
            gnn.HeteroConv({("a", key, "a"): kind(D, D) for key, kind in kinds.items()})
            for _ in range(2)
        )

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> Tensor:
        for conv in self.convs:
            x_dict = {key: x.relu() for key, x in conv(x_dict, edge_index_dict).items()}
        return x_dict["a"]


class WithData(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, data: Data) -> Tensor:
        return self.net(data.x, data.pos_edge_index, data.neg_edge_index)


def arguments(net: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Return what `net` is called with."""
    if isinstance(net, Signed):
        return {key: batch[key] for key in ("x", "pos_edge_index", "neg_edge_index")}
    if isinstance(net, Relations):
        both = {("a", key, "a"): batch[f"{key}_edge_index"] for key in ("pos", "neg")}
        return {"x_dict": {"a": batch["x"]}, "edge_index_dict": both}
    return {"data": Data(**batch)} if isinstance(net, WithData) else batch


@pytest.mark.parametrize("num_neg", [44, 61])
@pytest.mark.parametrize(
    ("partition", "recompute"),
    [(CHUNKS, False), (CHUNKS, True), (ONE_CHUNK, False)],
    ids=["chunks", "recomputed chunks", "one chunk"],
)
@pytest.mark.parametrize(
    "make", [Signed, Weighted, Relations, lambda: WithData(Signed())], ids=lambda make: ""
)
def test_p1_several_edge_sets_train_as_in_pyg(
    make: Any, partition: Tensor, recompute: bool, num_neg: int
) -> None:
    """An exact step equals plain PyG, a step in chunks behind it and inference do as well."""
    net = make()
    given = arguments(net, make_batch(num_neg))
    check_support(net, num_chunks=3)
    engine = one_process_engine(net, partition=partition, recompute=recompute)
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    expected = net(**given)
    expected.square().sum().backward()
    grads = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    for name, buffer in net.named_buffers():
        buffer.data = buffers[name]
    for step in range(2):
        engine.set_step(step_index=step)
        found = engine.forward((), given)
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=1e-10)
        found.square().sum().backward()
        if step == 0:
            for name, parameter in net.named_parameters():
                torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-10, atol=1e-10)
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(engine.forward((), given), net(**given), rtol=1e-10, atol=1e-10)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Weighted()

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        keys = ("x", "pos_edge_index", "neg_edge_index", "pos_edge_weight", "neg_edge_weight")
        return self.net(*(data[key] for key in keys)).square().mean()

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(data, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_p1_several_edge_sets_on_two_stages(tmp_path: Path) -> None:
    data = FullGraphDataModule(Data(**make_batch()))
    weights, losses = [], []
    for num_stages in (0, 2):
        L.seed_everything(1, verbose=False)
        module = Module()
        strategy = GNNPipeStrategy(num_chunks=4, start_method="fork", balance="uniform")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=max(num_stages, 1),
            strategy=strategy if num_stages else "auto",
            callbacks=[StalenessWarmup(num_epochs=9)] if num_stages else [],
            max_epochs=3,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, datamodule=data)  # validates first, in inference mode
        losses.append(trainer.callback_metrics["val_loss"])
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-10)


def test_a_forecast_of_several_edge_sets() -> None:
    data = FullGraphDataModule(Data(**make_batch()))
    plan = GNNPipeStrategy(num_chunks=4).plan(Module(), data, num_stages=2)
    assert plan.num_edges == 61 + 44
    assert sum(plan.chunk_edges) == plan.num_edges


def run(net: nn.Module, **given: Tensor) -> None:
    one_process_engine(net, partition=CHUNKS).forward((), given)


class Anonymous(nn.Module):
    """Its arguments do not tell what is what."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = gnn.GCNConv(D, D)

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return self.conv(x, first) + self.conv(x, second)


class Unclear(Anonymous):
    """Its weight could be of either edge set."""

    def forward(
        self, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor, edge_weight: Tensor
    ) -> Tensor:
        return self.conv(x, pos_edge_index, edge_weight) + self.conv(x, neg_edge_index)


class Crossed(Weighted):
    """Its weights are those of the other edge set, of the same size."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        named |= {"pos_edge_weight": named["neg_edge_weight"]}
        return super().forward(x, *others, **named)


class CountsNodes(gnn.MessagePassing):
    """Lets PyG count the nodes in each of two edge sets."""

    def forward(self, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor) -> Tensor:
        pos, neg = (add_self_loops(edges)[0] for edges in (pos_edge_index, neg_edge_index))
        return self.propagate(pos, x=x) - self.propagate(neg, x=x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = CountsNodes()
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor, pos_edge_index: Tensor, neg_edge_index: Tensor) -> Tensor:
        return self.lin(self.conv(x, pos_edge_index, neg_edge_index))


def test_p4_unclear_edge_sets_are_refused() -> None:
    batch = make_batch(num_neg=61)
    x, pos, neg, weight = (batch[key] for key in list(batch)[:4])
    with pytest.raises(UnsupportedError, match=r"which arguments .* are edges.*'first', 'second'"):
        run(Anonymous(), x=x, first=pos, second=neg)
    with pytest.raises(UnsupportedError, match="'edge_weight' to be named after the edges"):
        run(Unclear(), x=x, pos_edge_index=pos, neg_edge_index=neg, edge_weight=weight)
    with pytest.raises(GraphError, match=r"'neg_edge_index' to hold integers .*float64"):
        run(Signed(), x=x, pos_edge_index=pos, neg_edge_index=neg.double())
    with pytest.raises(UnsupportedError, match=r"num_nodes=x.size"):
        run(Counting(), x=x, pos_edge_index=pos, neg_edge_index=neg)


def test_p4_weights_of_another_edge_set_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="belongs to one edge set"):
        run(Crossed(), **make_batch(num_neg=61))


@pytest.mark.parametrize(
    ("aggr", "target", "text"), [("sum", "b", "several types"), ("max", "a", "aggr='max'")]
)
def test_p4_hetero_conv_is_refused_where_it_is_not_exact(aggr: str, target: str, text: str) -> None:
    conv = gnn.HeteroConv({("a", "to", target): gnn.SAGEConv(D, D)}, aggr=aggr)
    with pytest.raises(UnsupportedError, match=f"HeteroConv: .*{text}"):
        check_support(nn.ModuleList([conv]), num_chunks=2)


def test_a_change_of_one_edge_set_is_a_change_of_the_graph() -> None:
    net, batch = Signed(), make_batch()
    engine = one_process_engine(net, partition=CHUNKS)
    for stride in (3, 9):
        given = {**arguments(net, batch), "neg_edge_index": edges(44, stride)}
        found = engine.forward((), given)
        torch.testing.assert_close(found.detach(), net(**given).detach(), rtol=1e-10, atol=1e-10)
        found.sum().backward()

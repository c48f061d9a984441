"""Linear attention over all nodes trains in chunks: its sums are exact, or the oracle's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import chunk_order
from tests.helpers.alike import D, Fits, N, assert_alike, fit, graph, on_features
from tests.helpers.attention import ATTENTION_NETS
from tests.helpers.cases import slow
from tests.helpers.engines import one_process_engine
from tests.helpers.graphs import communities
from tests.helpers.modules import ReferenceModule
from tests.helpers.reference import StaleOracle
from tests.helpers.trainers import quiet_trainer, weights
from tests.passing.test_convs import assert_same, assert_step, move
from tests.promises.test_p2_stale_gradient import AGAIN, SHARDS, assert_equals_oracle

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("name", "num_chunks", "options"),
    [
        *((name, 3, {}) for name in ATTENTION_NETS),
        *((name, 2, {"scale": "drift"}) for name in ATTENTION_NETS),
        *(slow(name, 1, {"rule": "warmup"}) for name in ATTENTION_NETS),
        ("inline", 5, {"rule": "warmup_exact", **AGAIN}),
        ("sgformer", 5, {"rule": "exact", "scale": 2.0, "order": "fixed", **AGAIN}),
        ("heads", 16, {"rule": "snapshot", **AGAIN}),
        ("gps", 3, {"num_stages": 2, "validate": True}),
        slow("inline", 3, {"num_stages": 3, "rule": "warmup", **AGAIN}),
        slow("sgformer", 3, {"num_stages": 2, "repeat_encoder": True}),
        ("heads", 2, {**SHARDS, **AGAIN}),
        ("inline", 3, {"scale": "drift", **SHARDS}),
        slow("gps", 1, SHARDS),
        slow("polynormer", 2, {"num_stages": 2, "scale": 2.0, **SHARDS}),
    ],
)
def test_sums_over_all_nodes_equal_the_oracle(
    name: str, num_chunks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_equals_oracle(communities(num_chunks), tmp_path, name=name, **options)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", ATTENTION_NETS)
def test_the_oracle_by_rows_is_plain_pyg_and_exact_steps_equal_it(name: str) -> None:
    """Three steps, of which the second is pipelined: outputs and gradients."""
    case = communities(3)
    ours, theirs = (ReferenceModule(name).net for _ in range(2))
    inputs = {"x": case.data.x, "edge_index": case.data.edge_index}
    oracle = StaleOracle(theirs, case.partition)
    assert_same(oracle.exact(*inputs.values()), theirs(**inputs))
    engine = one_process_engine(ours, partition=case.partition)
    for step in (1, 2, 3):
        engine.controls.is_exact = step != 2
        order = chunk_order(3, epoch=step, seed=0)
        # An exact step leaves its rows for the next one.
        given = inputs.values()
        expected = oracle.chunked(*given, order=order) if step == 2 else oracle.exact(*given)
        assert_step(engine, inputs, ours, expected, theirs)
        move(ours, 0.05)
        move(theirs, 0.05)


class Between(nn.Module):
    """A function of all rows between two layers, in forward itself or in a module."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *, is_inline: bool) -> None:
        super().__init__()
        self.first, self.last = gnn.GCNConv(D, 6), gnn.GCNConv(6, 3)
        self.key = nn.Linear(6, 6)
        self.function = function if is_inline else Wrapped(function)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).tanh()
        return self.last(x + self.function(x, self.key(x)), edge_index)


class Wrapped(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return self.weight * self.function(x, k)


def in_place(x: Tensor, k: Tensor) -> Tensor:
    out = x @ torch.matmul(k.transpose(0, 1), x)
    out += x.size(0) * x
    return out / out.norm()


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "means": lambda x, k: x.mean(0) + k.mean(dim=0, keepdim=True),
    "sums": lambda x, k: torch.sum(x, 0) / x.size(0) - (x * k).sum() / x.shape[0],
    "norms": lambda x, k: x / torch.norm(x, p=2) + k / torch.linalg.vector_norm(k, dim=0),
    "products": lambda x, k: (x @ k.t() if len(x.shape) > 2 else x @ torch.mm(k.t(), x)) / 9,
    "batched": lambda x, k: (x[None] @ torch.bmm(k[None].mT, x[None]))[0] / x.size(0),
    "einsum": lambda x, k: torch.einsum("nd,df->nf", x, torch.einsum("nd,nf->df", [k, x])) / 9,
    "twice": lambda x, k: x * (k * (k * x).sum(0)).sum(0),
    "roots": lambda x, k: x.sum(0) / x.size(0) ** 0.5 + (1 / k.size(0)) * k.sum(0),
    "in place": in_place,
}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("is_inline", [True, False])
@pytest.mark.parametrize("name", SUMS)
def test_functions_that_add_up_rows_train_in_chunks(name: str, is_inline: bool) -> None:
    assert_alike(lambda: Between(SUMS[name], is_inline=is_inline))


def test_a_constant_that_is_the_size_of_the_small_graph_stays() -> None:
    """Sums are recognised on a small graph, whose number of nodes may be a constant, too."""

    def constants(x: Tensor, k: Tensor) -> Tensor:
        factors = [*range(2, 60), *(1 / n for n in range(2, 60)), math.log(45)]
        return x.mean(0) + sum(k * factor for factor in factors) / 2000

    assert_alike(lambda: Between(constants, is_inline=False))


def softmax_attention(x: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(x @ k.t(), dim=-1) @ x


ALL_AT_ONCE = "Softmax attention needs all rows at once"
ADD_UP = "add up rows of all nodes, as linear attention"
REFUSED: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
    (softmax_attention, f"only by sums, .* returns a value for each pair of nodes.*{ALL_AT_ONCE}"),
    (lambda x, k: x.max(0).values, ADD_UP),
    (lambda x, k: x * torch.softmax(k, dim=0), ADD_UP),
    (lambda x, k: x - x.std(0), ADD_UP),
    (lambda x, k: F.scaled_dot_product_attention(x[None], k[None], k[None])[0], ADD_UP),
    (lambda x, k: x[x[:, 0] > 1e9].sum(0), "mask that selects no row in a trial"),
]


@pytest.mark.parametrize(("function", "words"), REFUSED)
def test_other_functions_of_all_rows_are_refused(function: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        fit(lambda: Between(function, is_inline=True), num_chunks=3)


def test_softmax_attention_is_refused_in_words() -> None:
    def make() -> nn.Module:
        return Between(softmax_attention, is_inline=False)

    with pytest.raises(UnsupportedError, match=ALL_AT_ONCE):
        fit(make, num_chunks=3)
    fit(make, num_chunks=1)


def test_a_gate_that_starts_at_0_hides_nothing() -> None:
    """ReZero: at the beginning the output is that of a network without the function."""

    def make(function: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
        net = Between(function, is_inline=False)
        nn.init.zeros_(net.function.weight)
        return net

    with pytest.raises(UnsupportedError, match="the same values on chunks"):
        fit(lambda: make(lambda x, k: x.sum(0) / (x.size(0) - 1)), num_chunks=3)
    assert_alike(lambda: make(lambda x, k: x.sum(0) / x.size(0)))


def test_sums_in_a_checkpoint_are_refused_in_words() -> None:
    def attention(x: Tensor, k: Tensor) -> Tensor:
        return checkpoint(lambda x, k: x @ (k.t() @ x), x, k, use_reentrant=False)

    with pytest.raises(UnsupportedError, match=r"not inside .*checkpoint .got .*, in a checkpoint"):
        fit(lambda: Between(attention, is_inline=False), num_chunks=3)
    assert_alike(lambda: Between(attention, is_inline=True))


def test_a_norm_of_zeros_has_no_gradient() -> None:
    def dead(x: Tensor, k: Tensor) -> Tensor:
        h = torch.cat([k, (k - 9).relu()], dim=1)
        return (h / (h.norm(dim=0) + 1))[:, :6]

    assert_alike(lambda: Between(dead, is_inline=True))


class Still(Fits):
    """Trains with a rate of 0, so that pipelined steps return what exact ones do."""

    def __init__(self, net: nn.Module, call: Any) -> None:
        super().__init__(net, call)
        self.seen: list[Tensor] = []

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        outputs = self.call(self.net, data)
        self.seen.append(outputs.detach().clone())
        return outputs.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class KeepsStatistics(Wrapped):
    """Sums over all nodes that its results do not need, in one of its modes."""

    def __init__(self, *, in_training: bool) -> None:
        super().__init__(lambda x, k: x * (x * k).sum(0) / 9)
        self.in_training = in_training

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        if self.training == self.in_training:
            self.statistics = k.square().sum(0).detach()
        return super().forward(x, k)


def _first_in_training(net: nn.Module, data: Data) -> Tensor:
    """Switch the module between the layers to evaluation after the first training step."""
    if net.training:
        net.function.train(net.function.training and not hasattr(net.function, "statistics"))
    return net(data.x, data.edge_index)


@pytest.mark.parametrize("staleness", ["drift", "constant"])
@pytest.mark.parametrize(
    ("in_training", "call"), [(False, on_features), (True, on_features), (True, _first_in_training)]
)
def test_a_sum_of_one_mode_alone_is_not_taken_for_another(
    in_training: bool, call: Any, staleness: str
) -> None:
    net = Between(SUMS["sums"], is_inline=True)
    net.function = KeepsStatistics(in_training=in_training)
    module, loader = Still(net.double(), call), DataLoader([graph()], batch_size=None)
    piped = {"num_chunks": 3, "staleness": staleness}
    quiet_trainer(1, piped, max_epochs=4, num_sanity_val_steps=0).fit(module, loader, loader)
    with torch.no_grad():
        expected = net.eval()(graph().x, graph().edge_index)
    for found in module.seen:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_gps_trains_with_performer_attention_alone() -> None:
    class Net(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.first, self.last = gnn.GCNConv(D, 8), gnn.GCNConv(8, 3)
            self.gps = gnn.GPSConv(8, gnn.GCNConv(8, 8), heads=2, attn_type=kind)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.gps(self.first(x, edge_index), edge_index, edge_index.new_zeros(x.size(0)))
            return self.last(x, edge_index)

    assert_alike(lambda: Net("performer"), data=graph())
    with pytest.raises(UnsupportedError, match=r'softmax attention.*attn_type="performer" works'):
        fit(lambda: Net("multihead"), num_chunks=3)


class TwoPhases(Fits):
    """Trains the local layers of Polynormer, then the global ones on top."""

    def on_train_epoch_start(self) -> None:
        self.net._global = self.current_epoch > 1


def polynormer() -> nn.Module:
    rates = {"in_dropout": 0.0, "dropout": 0.0, "global_dropout": 0.0}
    return gnn.Polynormer(D, 8, 4, local_layers=3, global_layers=2, heads=1, **rates)


def run_phases(num_chunks: int) -> Fits:
    def call(net: Any, data: Data) -> Any:
        return net(data.x, data.edge_index, torch.zeros(N, dtype=torch.int64))

    torch.manual_seed(0)
    module, loader = TwoPhases(polynormer(), call), DataLoader([graph()], batch_size=None)
    piped = {"num_chunks": num_chunks} if num_chunks else None
    quiet_trainer(1, piped, max_epochs=4, num_sanity_val_steps=0).fit(module, loader, loader)
    return module


def test_a_global_phase_may_begin_in_mid_training() -> None:
    plain, exact, chunked = map(run_phases, (0, 1, 3))
    torch.testing.assert_close(weights(exact), weights(plain), rtol=0, atol=1e-8)
    chunked.eval()
    with torch.no_grad():
        expected = chunked.call(chunked.net, graph())
    torch.testing.assert_close(chunked.outputs[0], expected, rtol=0, atol=1e-10)


HABITS = {
    "a phase that begins in mid-training: Polynormer's local, then global layers": (
        "as plainly from that step on; the global layers run on all rows on each device",
        test_a_global_phase_may_begin_in_mid_training,
    ),
    "`SGFormer`, `SGFormerAttention`, `PerformerAttention`, `PolynormerAttention`": (
        "as plainly; sums over all nodes are as stale as statistics of norms",
        test_sums_over_all_nodes_equal_the_oracle,
        *("sgformer", "gps", "polynormer"),
    ),
    '`GPSConv(attn_type="performer")`': (
        "as plainly; its default, softmax attention, is refused",
        test_gps_trains_with_performer_attention_alone,
    ),
    "linear attention by hand: `k.t() @ v`, `einsum`, `k.sum(0)`, `q.norm()`, `x.size(0) * v`": (
        "as plainly, in `forward` or in a module; functions whose results on parts of the rows "
        "add up are found by trial",
        test_sums_over_all_nodes_equal_the_oracle,
        *("inline", "heads"),
    ),
    "means, sums and norms of all rows between layers, such as `x - x.mean(0)`": (
        "as plainly, likewise",
        test_functions_that_add_up_rows_train_in_chunks,
        *("means", "sums", "norms", "products", "batched", "einsum", "twice", "roots"),
    ),
    "softmax attention over all nodes between layers: `softmax(q @ k.t())`": (
        "refused: use linear attention, or `num_chunks=1`",
        test_softmax_attention_is_refused_in_words,
    ),
    "a maximum or a standard deviation of all rows between layers": (
        "refused, or `num_chunks=1`",
        test_other_functions_of_all_rows_are_refused,
    ),
}

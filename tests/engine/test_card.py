"""On a GPU: no tensor is on the wrong device, and the host waits for nothing of a chunk.

Run on a card that is not there (`tests/helpers/card.py`). A step of twice as many chunks has as
many waits, so none belongs to a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.calls import GraphBatch, GraphRows, Kind
from lightning_gnnpipe.calls.graph_batch import LeafRows
from lightning_gnnpipe.codecs.codec import get_codec
from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.models import GCNII
from lightning_gnnpipe.staleness import METHODS
from lightning_gnnpipe.staleness.copies import HostCopies
from tests.engine import test_recompute
from tests.helpers import engines
from tests.helpers.card import CUDA, HOST, Card, OnCard, card, put
from tests.helpers.cases import covering, slow
from tests.helpers.engines import one_process_engine

N, D, NUM_LAYERS = 48, 4, 2


class Stack(nn.Module):
    """Two equal layers."""

    def __init__(
        self, make: Callable[[], nn.Module], norm: Callable[[], nn.Module] = nn.Identity
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(NUM_LAYERS))
        self.norms = nn.ModuleList(norm() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, edge_index)).relu()
        return x


class LateCopies(HostCopies):
    """Copies to the host that arrive when they are waited for, and not before."""

    def send(self, rows: Tensor, place: Tensor) -> Callable[[], object]:
        given, has_come = getattr(rows, "held", rows).clone(), False

        def wait() -> None:
            nonlocal has_come
            if not has_come:
                place.copy_(given)
            has_come = True

        place.fill_(torch.nan)
        return wait


sums = partial(GCNII, D, D, D, NUM_LAYERS, dropout=0.5)
means = partial(Stack, partial(gnn.SAGEConv, D, D))
messages = partial(Stack, partial(gnn.TransformerConv, D, D))
statistics = partial(Stack, partial(gnn.GCNConv, D, D), partial(nn.BatchNorm1d, D))

# name: (network, options of the engine, the most operations for one chunk in one layer)
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "sums": (sums, {}, 78),
    "sums, recomputed": (sums, {"recompute": True}, 110),
    "means": (means, {}, 53),
    "snapshots": (sums, {"method": METHODS["gnnpipe"]}, 63),
    "messages": (messages, {}, 215),
    "messages, recomputed": (messages, {"recompute": True}, 340),
    "statistics": (statistics, {}, 200),
    "rows on the host": (messages, {"history_device": HOST}, 205),
    "rows on the host, recomputed": (messages, {"history_device": HOST, "recompute": True}, 320),
    "bfloat16 rows": (sums, {"history_dtype": torch.bfloat16}, 80),
    "recorded": (messages, {}, 235),
}


@pytest.fixture(autouse=True)
def copies_arrive_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gnnpipe.staleness.store.HostCopies", LateCopies)


def inputs() -> tuple[Tensor, Tensor]:
    number = torch.arange(200)
    edges = torch.stack([(number * 7 + number // 5) % N, (number * 3 + 1) % N])
    return torch.randn(N, D), edges


def engine_of(net: nn.Module, num_chunks: int, **options: Any) -> PipelineEngine:
    options = {"method": METHODS["drift"], "self_check": False, **options}
    return one_process_engine(net, partition=torch.arange(N) * num_chunks // N, **options)


def train(
    name: str, num_chunks: int, counted: Card | None = None
) -> tuple[list[Tensor], dict[str, int], int]:
    """Return the third step's results, waits and operations; the first step is exact."""
    make, options, _ = CASES[name]
    torch.manual_seed(0)
    net, given = make(), inputs()
    if counted is not None:
        net, given = put(net), tuple(map(OnCard, given))
    engine = engine_of(net, num_chunks, self_check=name == "sums", **options)
    for step in range(3):
        engine.set_step(step_index=step)
        engine.controls.records_staleness = name == "recorded"
        if counted is not None:
            counted.clear()
        output = engine.forward(given, {})
        output.square().sum().backward()
        found = [output.detach(), *(parameter.grad for parameter in net.parameters())]
        if step < 2:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
    if counted is None:
        return found, {}, 0
    return [one.held for one in found], dict(counted.waits), counted.num_ops


SLOW = ("means", "messages, recomputed", "rows on the host", "bfloat16 rows")


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in CASES])
def test_chunks_on_a_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are the CPU's; no tensor is on the wrong device; no wait belongs to a chunk."""
    expected, _, _ = train(name, 3)
    monkeypatch.setattr(engines, "DEVICE", CUDA)
    with card() as counted:
        found, waits, num_ops = train(name, 3, counted)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        _, more_waits, more_ops = train(name, 6, counted)
    assert more_waits == waits
    assert (more_ops - num_ops) / 3 / NUM_LAYERS <= CASES[name][2]


def waits_of(net: nn.Module, counted: Card, *, validates: bool = False) -> int:
    """Return the waits of a third step of three chunks, or of a validation after it."""
    given, engine = tuple(map(OnCard, inputs())), engine_of(put(net), 3)
    for step in range(3):
        engine.set_step(step_index=step)
        counted.clear()
        engine.forward(given, {}).sum().backward()
    if validates:
        net.eval()
        engine.set_step(is_validating=True)
        counted.clear()
        with torch.no_grad():
            engine.forward(given, {})
    return sum(counted.waits.values())


def test_turned_edges_and_statistics_that_validation_replaces_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "DEVICE", CUDA)
    with card() as counted:
        flipped = waits_of(Stack(lambda: gnn.DirGNNConv(gnn.SAGEConv(D, D))), counted)
        assert flipped == waits_of(means(), counted)
        with_norms = waits_of(statistics(), counted, validates=True)
        assert with_norms == waits_of(means(), counted, validates=True)


@pytest.mark.parametrize("name", ["int1", "int8", "bf16"])
def test_messages_on_a_card(name: str) -> None:
    codec, rows = get_codec(name), torch.randn(50, 16)
    expected = torch.empty_like(rows)
    codec.decode(codec.encode(rows, 1), expected)
    with card() as counted:
        there, out = OnCard(rows), OnCard(torch.empty_like(rows))
        codec.decode(codec.encode(there, 0), out)  # makes the table of one bit
        counted.clear()
        codec.decode(codec.encode(there, 1), out)
    assert not counted.waits
    torch.testing.assert_close(out.held, expected, rtol=0, atol=0)


def test_micro_batches_on_a_card() -> None:
    """Their parts of a batch, and the outputs that are not there yet, are taken without a wait."""
    owner = torch.tensor([0, 0, 1, 1, 1, 2])
    edges = torch.tensor([[0, 1, 2, 4, 5], [1, 0, 3, 2, 5]])
    of_edge = owner[edges[0]]
    with card() as counted:
        per_graph = [OnCard(torch.tensor(one)) for one in ([0, 2, 5], [2, 3, 1])]
        hows = LeafRows(Kind.EDGE, 0, 1, *per_graph), LeafRows(Kind.PTR)
        graphs = GraphBatch(3, 3, (2, 3, 1), OnCard(owner), (OnCard(of_edge),), hows)
        rows, pointers = GraphRows(graphs, (0, 2, 1)), OnCard(torch.tensor([0, 2, 5, 6]))

        def take(group: tuple[int, int]) -> list[list[int]]:
            parts = [rows.take(OnCard(edges), hows[0], group), rows.take(pointers, hows[1], group)]
            return [one.held.tolist() for one in parts]

        assert take((0, 1)) == [[[0, 1], [1, 0]], [0, 2]]  # makes what all of them share
        counted.clear()
        assert take((1, 3)) == [[[0, 1, 3], [0, 2, 1]], [0, 1, 4]]
        assert not counted.waits


def test_waits_and_mixtures_are_seen() -> None:
    with card() as counted:
        x = OnCard(torch.arange(4.0))
        x[x > 1].sum().item()
        x.tolist()
        x.new_tensor([1.0])
        x[[0, 1]] = 2.0
        torch.ones(2).to(x.device)
        x.repeat_interleave(OnCard(torch.ones(4, dtype=torch.int64)))
        assert len(counted.waits) == 8  # a list of places is copied, and then read
        with pytest.raises(RuntimeError, match="tensors on cuda:0 and on the CPU"):
            x + torch.ones(4)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("name", "recompute"), covering(["mixed", "gcnii", "drops always"], [False, True])
)
def test_rows_on_the_host_are_read_when_they_have_arrived(name: str, recompute: bool) -> None:
    late = test_recompute.train(name, recompute=recompute, history_device=torch.device("cpu:0"))
    here = test_recompute.train(name, recompute=recompute)
    for found, expected in zip(late, here, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_late_rows_are_saved_loaded_and_kept_in_snapshots() -> None:
    torch.manual_seed(0)
    elsewhere = torch.device("cpu:0")
    engine = engine_of(messages(), 4, method=METHODS["gnnpipe"], history_device=elsewhere)
    given = inputs()
    for step in range(2):
        engine.set_step(step_index=step)
        engine.forward(given, {}).sum().backward()
    store = engine.graphs.trained.store
    for key in store:
        saved = store.save(key)
        assert saved["rows"].isfinite().all() and saved["kept"].isfinite().all()
        expected = store.rows(key) + 1
        store.push(key, engine.graphs.trained.graph.plan.chunks[0], saved["rows"][: N // 4])
        store.load(key, **{**saved, "rows": expected})
        assert torch.equal(store.rows(key), expected)

"""What a GPU would wait for: the host reads nothing of a chunk, and launches few operations for it.

Counted on the CPU. A step of twice as many chunks has as many waits, so none belongs to a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.codecs import get_codec
from lightning_gnnpipe.models import GCNII
from lightning_gnnpipe.staleness import METHODS, HistoryStore
from lightning_gnnpipe.staleness.buffers import HostCopies
from tests.engine import test_recompute
from tests.helpers.engines import one_process_engine
from tests.helpers.waits import Waits, counting_waits

N, D, NUM_LAYERS = 64, 6, 3


class Stack(nn.Module):
    """Three equal layers."""

    def __init__(self, make: Callable[[], nn.Module], norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(NUM_LAYERS))
        self.norms = nn.ModuleList(norm() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, edge_index)).relu()
        return x


def stack(make: Callable[[], nn.Module], norm: Callable[[], nn.Module] = nn.Identity) -> Any:
    return lambda: Stack(make, norm)


ELSEWHERE = torch.device("cpu:0")  # another device than `cpu` to all that compares the two
# name: (network, options of the engine, the most operations for one chunk in one layer)
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "sums": (lambda: GCNII(D, D, D, NUM_LAYERS), {}, 150),
    "sums, recomputed": (lambda: GCNII(D, D, D, NUM_LAYERS), {"recompute": True}, 200),
    "means": (stack(lambda: gnn.SAGEConv(D, D)), {}, 150),
    "snapshots": (lambda: GCNII(D, D, D, NUM_LAYERS), {"method": METHODS["gnnpipe"]}, 150),
    "messages": (stack(lambda: gnn.TransformerConv(D, D)), {}, 250),
    "messages, recomputed": (stack(lambda: gnn.TransformerConv(D, D)), {"recompute": True}, 350),
    "statistics": (stack(lambda: gnn.GCNConv(D, D), lambda: nn.BatchNorm1d(D)), {}, 350),
    "rows on the host": (
        stack(lambda: gnn.TransformerConv(D, D)),
        {"history_device": ELSEWHERE},
        250,
    ),
    "bfloat16 rows": (
        lambda: GCNII(D, D, D, NUM_LAYERS),
        {"history_dtype": torch.bfloat16},
        150,
    ),
}


def count(
    make: Callable[[], nn.Module], options: dict[str, Any], num_chunks: int, *, records: bool
) -> Waits:
    """Return the waits of a step in chunks, after an exact one and one in chunks."""
    torch.manual_seed(0)
    net, number = make(), torch.arange(400)
    edges = torch.stack([(number * 7 + number // 5) % N, (number * 3 + 1) % N])
    options = {"method": METHODS["drift"], **options}
    engine = one_process_engine(net, partition=torch.arange(N) * num_chunks // N, **options)
    x = torch.randn(N, D)
    for step in range(3):
        engine.set_step(step_index=step)
        engine.controls.records_staleness = records
        with counting_waits() as waits:
            engine.forward((x, edges), {}).square().sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return waits


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_chunk_makes_the_host_wait(name: str, records: bool) -> None:
    make, options, most = CASES[name]
    few, many = (count(make, options, num_chunks, records=records) for num_chunks in (4, 8))
    assert many.places == few.places
    per_chunk = (many.num_ops - few.num_ops) / 4
    assert per_chunk / NUM_LAYERS < most * (1 + records)


@pytest.mark.parametrize("name", ["int1", "int8", "bf16"])
def test_no_message_makes_the_host_wait(name: str) -> None:
    codec, rows = get_codec(name), torch.randn(50, 16)
    out = torch.empty_like(rows)
    codec.decode(codec.encode(rows, 0), out)  # the table of one bit is made once
    with counting_waits() as waits:
        codec.decode(codec.encode(rows, 1), out)
    assert not waits.places


def test_a_wait_is_seen() -> None:
    x = torch.arange(4.0)
    with counting_waits() as waits:
        x[x > 1].sum().item()
        x.tolist()
        x.new_tensor([1.0])
        x[[0, 1]] = 2.0
        torch.tensor([1.0], device="cpu")
    assert sum(waits.places.values()) == 5


class LateCopies(HostCopies):
    """Copies to the host that arrive when they are waited for, and not before."""

    def send(self, rows: Tensor, place: Tensor) -> Callable[[], object]:
        given, has_come = rows.clone(), False

        def wait() -> None:
            nonlocal has_come
            if not has_come:
                place.copy_(given)
            has_come = True

        place.fill_(torch.nan)
        return wait


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", test_recompute.NETS)
def test_rows_on_the_host_are_read_when_they_have_arrived(
    name: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = test_recompute.train(name, recompute=recompute, history_device=ELSEWHERE)
    monkeypatch.setattr("lightning_gnnpipe.staleness.store.HostCopies", LateCopies)
    found = test_recompute.train(name, recompute=recompute, history_device=ELSEWHERE)
    for late, at_once in zip(found, expected, strict=True):
        torch.testing.assert_close(late, at_once, rtol=0, atol=0)


def test_late_rows_are_saved_loaded_and_kept_in_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gnnpipe.staleness.store.HostCopies", LateCopies)
    torch.manual_seed(0)
    engine = one_process_engine(
        Stack(lambda: gnn.TransformerConv(D, D), nn.Identity),
        partition=torch.arange(N) * 4 // N,
        method=METHODS["gnnpipe"],
        history_device=ELSEWHERE,
    )
    number = torch.arange(400)
    inputs = torch.randn(N, D), torch.stack([(number * 7) % N, (number * 3 + 1) % N])
    for step in range(2):
        engine.set_step(step_index=step)
        engine.forward(inputs, {}).sum().backward()
    store = engine.graphs.trained.store
    assert isinstance(store, HistoryStore)
    for key in store:
        saved = store.save(key)
        assert saved["rows"].isfinite().all() and saved["kept"].isfinite().all()
        expected = store.rows(key) + 1
        store.push(key, engine.graphs.trained.graph.plan.chunks[0], saved["rows"][:16])
        store.load(key, **{**saved, "rows": expected})
        assert torch.equal(store.rows(key), expected)

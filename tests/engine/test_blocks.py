"""Blocks of layers: how they are dealt out, and what waits between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe import BlockGradients, DelayedGradients, GNNPipeStrategy, StalenessMethod
from lightning_gnnpipe.engine.blocks import block_cuts, block_sizes, whole_blocks
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.history import LateGradients
from tests.helpers.engines import one_process_engine
from tests.helpers.graphs import communities
from tests.helpers.launch import run_fit
from tests.helpers.modules import ReferenceModule


@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "sizes", "cuts"),
    [
        (32, 2, (16, 16), (16,)),
        (32, 3, (10, 11, 11), (10, 21)),
        (3, 2, (1, 2), (1,)),
        (3, 9, (1, 1, 1), (1, 2)),
        (5, 1, (5,), ()),
    ],
)
def test_blocks_are_alike_but_for_one_layer(
    num_layers: int, num_blocks: int, sizes: tuple[int, ...], cuts: tuple[int, ...]
) -> None:
    assert block_sizes(num_layers, num_blocks) == sizes
    assert block_cuts(num_layers, num_blocks) == cuts


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "counts"),
    [
        (2, 2, (16, 16)),
        (4, 2, (16, 16)),
        (3, 2, (21, 11)),
        (5, 1, (32,)),
        (2, 3, None),
        (0, 1, None),
    ],
)
def test_stages_get_whole_blocks(
    num_blocks: int, num_stages: int, counts: tuple[int, ...] | None
) -> None:
    assert whole_blocks(32, num_blocks, num_stages) == counts


def grads(value: float) -> dict[str, Tensor]:
    return {"h": torch.full((2, 1), value)}


def taken(late: LateGradients) -> float | None:
    found = late.take(4)
    return None if found is None else float(found["h"][0])


def test_what_is_late_follows_the_loss_scale() -> None:
    late = LateGradients()
    for value in (1.0, 3.0):
        late.put(4, grads(value))
        late.end_step(is_exact=False)
    late.rescale(2.0)
    assert taken(late) == 6
    late.rescale(None)
    assert taken(late) is None


def test_an_exact_step_leaves_nothing() -> None:
    late = LateGradients()
    late.put(4, grads(1.0))
    late.end_step(is_exact=False)
    late.end_step(is_exact=True)
    assert taken(late) is None and late.save() == {}


def test_what_is_saved_goes_on_alike() -> None:
    late, other = (LateGradients() for _ in range(2))
    for value in (1.0, 3.0):
        late.put(4, grads(value))
        late.end_step(is_exact=False)
    other.load(late.save())
    assert taken(other) == taken(late) == 3
    other.rescale(2.0)
    assert taken(late) == 3  # no tensor in common


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "'num_blocks' of BlockGradients to be at least 1"),
        ({"num_blocks": True}, "'num_blocks' of BlockGradients to be at least 1"),
        ({"num_blocks": 1.5}, "'num_blocks' of BlockGradients to be at least 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlockGradients(**options)


def test_an_encoder_is_not_computed_again() -> None:
    with pytest.raises(ConfigError, match="'repeat_encoder' to be 'auto' or False"):
        GNNPipeStrategy(staleness="blocks", repeat_encoder=True)
    GNNPipeStrategy(staleness=StalenessMethod(DelayedGradients()), repeat_encoder=True)


@pytest.mark.parametrize(("num_blocks", "warns"), [(2, True), (3, False), (4, False)])
def test_stages_that_share_a_block_are_told(num_blocks: int, warns: bool, tmp_path: Path) -> None:
    """Once, by the first rank."""
    case = communities(5)
    log, handler = logging.getLogger("lightning_gnnpipe"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    try:
        run_fit(
            ReferenceModule("gcn"),
            case.data,
            num_stages=3,
            num_chunks=5,
            partition=case.partition,
            max_epochs=1,
            tmp_path=tmp_path,
            strategy_kwargs={"staleness": StalenessMethod(BlockGradients(num_blocks))},
        )
    finally:
        log.removeHandler(handler)
        handler.close()
    assert (tmp_path / "log").read_text().count("share a block") == warns


NUM_NODES, WIDTH = 40, 8
EDGES = torch.randint(0, NUM_NODES, (2, 200), generator=torch.Generator().manual_seed(0))
Layer = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]
Begin = Callable[[], tuple[Tensor, ...]]


class Residual(nn.Module):
    """Layers that join their input and the first one's, as `layer` says."""

    def __init__(self, layer: Layer, conv: type[nn.Module] = gnn.GCNConv) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.convs = nn.ModuleList(conv(WIDTH, WIDTH) for _ in range(4))
        self.layer, self.reads_first = layer, True

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        more = () if edge_weight is None else (edge_weight,)
        h = x_0 = self.lin(x)
        for conv in self.convs:
            h = self.layer(lambda rows, conv=conv: conv(rows, edge_index, *more), h, x_0)
        return h + x_0 if self.reads_first else h


LAYERS: dict[str, Layer] = {
    "stack behind": lambda conv, h, x_0: conv(h).tanh() + torch.stack([h, x_0]).sum(0),
    "stack before": lambda conv, h, x_0: conv(torch.stack([h, x_0]).sum(0)).tanh(),
    "view": lambda conv, h, x_0: (
        conv(h).tanh().view(-1, 2, 4) + h.view(-1, 2, 4) + x_0.view(-1, 2, 4)
    ).flatten(1),
    "plain": lambda conv, h, x_0: conv(h).tanh(),
}


def standing_still(
    net: Residual,
    num_blocks: int,
    steps: Sequence[Callable[[], tuple[Tensor, ...]]],
    **options: Any,
) -> list[bool]:
    """Compare the gradients of steps without change of weights with the exact ones.

    Args:
        steps: What each step is given behind features and edges, called when it begins.

    Returns:
        Whether each was exact.
    """
    net = net.double()
    x = torch.randn(NUM_NODES, WIDTH, dtype=torch.float64)
    partition, method = torch.arange(NUM_NODES) % 4, StalenessMethod(BlockGradients(num_blocks))
    engine = one_process_engine(net, partition=partition, method=method, **options)
    engine.attach()
    was_exact = []
    for begin in steps:
        given = begin()
        net.zero_grad()
        net(x, EDGES, *given).square().sum().backward()
        found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        was_exact.append(engine.last_step.record.is_exact)
        net.zero_grad()
        Residual.forward(net, x, EDGES, *given).square().sum().backward()
        for grad, parameter in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-10, atol=1e-10)
    engine.detach()
    return was_exact


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_leaves_whose_gradients_share_memory(layer: str, num_blocks: int, recompute: bool) -> None:
    """Autograd gives them views of one tensor."""
    steps: list[Any] = [tuple] * 6
    was_exact = standing_still(Residual(LAYERS[layer]), num_blocks, steps, recompute=recompute)
    assert was_exact == [True, *[False] * 5]


def test_a_layer_that_goes_another_way_from_a_step_on() -> None:
    """From a fused product to PyG's messages, without an exact step between."""
    net = Residual(LAYERS["plain"])

    def hook() -> tuple[Tensor, ...]:
        for conv in net.convs:
            conv.register_message_forward_hook(lambda *_: None)
        return ()

    was_exact = standing_still(net, 2, [tuple, tuple, tuple, hook, tuple])
    assert was_exact == [True, *[False] * 4]


@pytest.mark.parametrize("reads_first", [False, True])
def test_what_waits_is_not_for_a_trace_that_hands_on_something_else(reads_first: bool) -> None:
    net = Residual(LAYERS["plain"])

    def switch(reads: bool) -> Begin:
        def begin() -> tuple[Tensor, ...]:
            net.reads_first = reads
            return ()

        return begin

    first, other = switch(reads_first), switch(not reads_first)
    standing_still(net, 2, [first, first, first, other, other, first])


def test_backward_under_autocast_is_in_the_dtype_of_forward() -> None:
    found = []
    for is_on in (False, True):
        torch.manual_seed(0)
        net = Residual(LAYERS["plain"], gnn.GATConv)
        x = torch.randn(NUM_NODES, WIDTH)
        partition, method = torch.arange(NUM_NODES) % 4, StalenessMethod(BlockGradients(1))
        engine = one_process_engine(net, partition=partition, method=method)
        engine.attach()
        for _ in range(3):
            net.zero_grad()
            output = net(x, EDGES)
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                output.sum().backward()
        engine.detach()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    assert torch.equal(*found)

"""ViG and PixelViG: the formulas, each graph by itself, and sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Batch
from torch_geometric.nn import MessagePassing
from vig import MaxRelativeConv, NearestNeighbours, PixelViG, ViG

from tests.helpers.batches import EXACT, NUM_FEATURES, assert_same, draw_batch

CONVS = ["max_relative", "edge", "gin", "sage"]
GRID = (3, 4)
UNEQUAL = [5, 1, 12, 3, 1]


def build(**options) -> ViG:
    torch.manual_seed(0)
    return ViG(NUM_FEATURES, 8, 4, 3, **({"num_neighbours": 4} | options)).double()


def build_pixels(**options) -> PixelViG:
    torch.manual_seed(0)
    widths = dict(grapher_channels=8, feed_forward_channels=16, head_channels=12)
    return PixelViG(NUM_FEATURES, 4, 2, **widths, **options).double()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def find_edges(x: Tensor, num_neighbours: int) -> list[list[int]]:
    """Return for each row of one graph the rows of largest cosine, found by sorting."""
    cosines = [[float(F.cosine_similarity(a, b, dim=0)) for b in x] for a in x]
    order = [sorted(range(len(x)), key=lambda m, row=row: -row[m]) for row in cosines]
    return [others[:num_neighbours] for others in order]


def compute_vig(net: ViG, x: Tensor) -> Tensor:
    """Return the logits of one image, its nodes one by one."""
    if isinstance(net.stem[0], nn.Linear):
        x = net.stem[0](x)
    else:
        rows, columns = GRID
        x = net.stem[0].lin(x)
        weight, bias = net.stem[0].conv.weight, net.stem[0].conv.bias
        out = []
        for n in range(rows * columns):
            row, column = divmod(n, columns)
            around = x[n] + bias
            for i, j in itertools.product(range(3), range(3)):
                r, c = row + i - 1, column + j - 1
                if 0 <= r < rows and 0 <= c < columns:
                    around = around + weight[:, 0, i, j] * x[r * columns + c]
            out.append(around)
        x = torch.stack(out)
    x = net.stem[1](x)
    for grapher, feed_forward in zip(net.graphers, net.feed_forwards, strict=True):
        h = grapher.lin_in(x)
        read = []
        for n, others in enumerate(find_edges(h, grapher.neighbours.num_neighbours)):
            change = torch.stack([h[m] - h[n] for m in others]).amax(dim=0)
            read.append(torch.cat([h[n], change]))
        conv = torch.stack(read) @ grapher.conv.lin.weight.t() + grapher.conv.lin.bias
        x = x + grapher.lin_out(conv)
        first, norm, _, second, norm_out, _ = feed_forward.branch
        x = x + norm_out(second(F.gelu(norm(first(x)))))
    return net.head.mlp(x.mean(dim=0))


@pytest.mark.parametrize("grid", [None, GRID])
def test_vig_is_its_formula(grid):
    net, batch = build(grid=grid), draw_batch([12] * 3)
    expected = torch.stack([compute_vig(net, x) for x in batch.x.split(12)])
    found = net(batch.x, batch.batch)
    assert_same(net, found, expected)


def test_pixel_vig_is_its_formula():
    net, batch = build_pixels(), draw_batch([4, 6])
    adjacency = torch.zeros(10, 10, dtype=torch.float64)
    for source, target in batch.edge_index.t():
        adjacency[target, source] += 1
    x = batch.x
    for block in net.blocks:
        h = block.lin_in(x)
        root, rel = block.conv.lin_root, block.conv.lin_rel
        mixed = h @ root.weight.t() + adjacency @ h @ rel.weight.t() + rel.bias
        x = x + block.lin_out(F.gelu(mixed))
        x = x + block.feed_forward(x)
    expected = net.head.mlp(torch.stack([x[:4].sum(0), x[4:].sum(0)]))
    found = net(batch.x, batch.edge_index, batch.batch)
    assert_same(net, found, expected)


def test_max_relative_of_a_node_without_edges_is_zero():
    conv = MaxRelativeConv(1, 1).double()
    conv.lin.weight.data = torch.tensor([[1.0, 10.0]], dtype=torch.float64)
    conv.lin.bias.data.zero_()
    x = torch.tensor([[1.0], [5.0], [7.0]], dtype=torch.float64)
    out = conv(x, torch.tensor([[1, 2, 0], [0, 0, 1]]))  # 1, 2 -> 0 and 0 -> 1; none to 2
    assert out.flatten().tolist() == [1 + 10 * 6, 5 + 10 * -4, 7]


@pytest.mark.parametrize("sizes", [[12], [7, 7, 7], UNEQUAL])
@pytest.mark.parametrize("num_neighbours", [1, 4, 20])
def test_neighbours_are_those_found_by_sorting(sizes, num_neighbours):
    batch = draw_batch(sizes)
    edges = NearestNeighbours(num_neighbours)(batch.x, batch.batch)
    expected = {
        (first + m, first + n)
        for x, first in zip(batch.x.split(sizes), batch.ptr.tolist(), strict=False)
        for n, others in enumerate(find_edges(x, num_neighbours))
        for m in others
    }
    pairs = [tuple(pair) for pair in edges.t().tolist()]
    assert set(pairs) == expected and len(pairs) == len(expected)
    assert torch.equal(edges[1], edges[1].sort().values)


def test_graphs_without_nodes_have_no_edges_and_logits_of_their_own():
    batch = torch.tensor([0, 0, 2, 2])  # none of graph 1
    x = draw_batch([4]).x
    net = build()
    without = net(x, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(net(x, batch)[[0, 2]], without, **EXACT)
    torch.testing.assert_close(net(x, batch)[1], net.head.mlp(x.new_zeros(8)), **EXACT)


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize("sizes, grid", [(UNEQUAL, None), ([12, 12, 12], GRID)])
def test_logits_and_gradients_do_not_depend_on_the_other_graphs(conv, sizes, grid):
    net, batch = build(conv=conv, grid=grid), draw_batch(sizes)

    def run(batch):
        net.zero_grad()
        logits = net(batch.x, batch.batch)
        logits.square().sum().backward()
        return logits.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None]

    logits, gradients = run(batch)
    apart = [run(Batch.from_data_list([graph])) for graph in batch.to_data_list()]
    torch.testing.assert_close(logits, torch.cat([one for one, _ in apart]), **EXACT)
    for whole, *parts in zip(gradients, *(parts for _, parts in apart), strict=True):
        torch.testing.assert_close(whole, sum(parts), **EXACT)


def test_vig_for_cifar_has_about_the_size_of_the_study():
    net = ViG(48, 96, 10, grid=(8, 8))
    assert count(net) == pytest.approx(1_120_410, rel=0.02)
    assert count(net.graphers[0]) + count(net.feed_forwards[0]) == pytest.approx(138_258, rel=0.02)
    assert len([m for m in net.modules() if isinstance(m, MessagePassing)]) == 8


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_pixel_vig_has_the_size_of_the_study(norm):
    net = PixelViG(norm=norm)
    assert count(net) == 1_120_410
    assert {count(block) for block in net.blocks} == {138_258}


@pytest.mark.parametrize("conv", CONVS)
def test_every_parameter_gets_a_gradient_with_batch_norm(conv):
    net, batch = build(conv=conv, norm="batch", grid=GRID, dropout=0.1), draw_batch([12])
    logits = net(batch.x, batch.batch)
    assert logits.shape == (1, 4)
    logits.square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_images_that_fill_no_grid_are_refused():
    with pytest.raises(ValueError, match=r"Expected images of 3 x 4 nodes each \(got 13 nodes\)"):
        build(grid=GRID)(torch.zeros(13, NUM_FEATURES).double(), torch.zeros(13).long())

"""ViG and PixelViG: the formulas, each graph by itself, and sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vig import MaxRelativeConv, NearestNeighbours, PixelViG, ViG

from tests.helpers.batches import NUM_FEATURES, assert_same, draw_batch

GRID = (3, 4)


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


def test_max_relative_conv_is_its_formula():
    conv = MaxRelativeConv(1, 1).double()
    conv.lin.weight.data = torch.tensor([[1.0, 10.0]], dtype=torch.float64)
    conv.lin.bias.data.zero_()
    x = torch.tensor([[1.0], [5.0], [7.0]], dtype=torch.float64)
    out = conv(x, torch.tensor([[1, 2, 0], [0, 0, 1]]))  # 1, 2 -> 0 and 0 -> 1; none to 2
    assert out.flatten().tolist() == [1 + 10 * 6, 5 + 10 * -4, 7]


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


@pytest.mark.parametrize("sizes", [[12], [5, 1, 12, 3, 1]])
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


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_pixel_vig_has_the_size_of_the_study(norm):
    net = PixelViG(norm=norm)
    assert count(net) == 1_120_410
    assert {count(block) for block in net.blocks} == {138_258}


def test_images_that_fill_no_grid_are_refused():
    with pytest.raises(ValueError, match=r"Expected images of 3 x 4 nodes each \(got 13 nodes\)"):
        build(grid=GRID)(torch.zeros(13, NUM_FEATURES).double(), torch.zeros(13).long())

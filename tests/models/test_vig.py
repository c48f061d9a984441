"""ViG and PixelViG: the formulas, each graph by itself, sizes, traceable, and ViG learns digits."""

from __future__ import annotations

import itertools

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import grid as join_grid
from torch_geometric.utils import remove_self_loops
from vig import MaxRelativeConv, NearestNeighbours, PixelViG, ViG

from tests.models.batches import EXACT, draw_graphs, draw_images, join, trace_net

CONVS = ["max_relative", "edge", "gin", "sage"]
GRID = (3, 4)
UNEQUAL = [5, 1, 12, 3, 1]


def build(**options) -> ViG:
    torch.manual_seed(0)
    return ViG(3, 8, 4, 3, **({"num_neighbours": 4} | options)).double()


def build_pixels(**options) -> PixelViG:
    torch.manual_seed(0)
    widths = dict(grapher_channels=8, feed_forward_channels=16, head_channels=12)
    return PixelViG(3, 4, 2, **widths, **options).double()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# The formulas


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
    net, images = build(grid=grid), draw_images(3, GRID, 3)
    batch = join(images)
    expected = torch.stack([compute_vig(net, image.x) for image in images])
    torch.testing.assert_close(net(batch.x, batch.batch), expected, **EXACT)


def test_pixel_vig_is_its_formula():
    net, batch = build_pixels(), join(draw_graphs([4, 6], 3))
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
    torch.testing.assert_close(net(batch.x, batch.edge_index, batch.batch), expected, **EXACT)


def test_max_relative_of_a_node_without_edges_is_zero():
    conv = MaxRelativeConv(1, 1).double()
    conv.lin.weight.data = torch.tensor([[1.0, 10.0]], dtype=torch.float64)
    conv.lin.bias.data.zero_()
    x = torch.tensor([[1.0], [5.0], [7.0]], dtype=torch.float64)
    out = conv(x, torch.tensor([[1, 2, 0], [0, 0, 1]]))  # 1, 2 -> 0 and 0 -> 1; none to 2
    assert out.flatten().tolist() == [1 + 10 * 6, 5 + 10 * -4, 7]


# Neighbours


def test_neighbours_are_of_the_same_graph_and_by_direction():
    """Graph 0 has directions east, north-east, north; graph 1 east and west; graph 2 one node."""
    x = torch.tensor([[1.0, 0], [3, 2], [0, 1], [9, 0], [-1, 0], [0, 5]])
    batch = torch.tensor([0, 0, 0, 1, 1, 2])
    source, target = NearestNeighbours(2)(x, batch)
    found = {n: set(source[target == n].tolist()) for n in range(6)}
    assert found == {0: {0, 1}, 1: {0, 1}, 2: {1, 2}, 3: {3, 4}, 4: {3, 4}, 5: {5}}
    assert torch.equal(target, target.sort().values)


@pytest.mark.parametrize("sizes", [[12], [7, 7, 7], UNEQUAL])
@pytest.mark.parametrize("num_neighbours", [1, 4, 20])
def test_neighbours_are_those_found_by_sorting(sizes, num_neighbours):
    graphs = draw_graphs(sizes, 5)
    batch = join(graphs)
    edges = NearestNeighbours(num_neighbours)(batch.x, batch.batch)
    expected = {
        (int(first) + m, int(first) + n)
        for graph, first in zip(graphs, batch.ptr, strict=False)
        for n, others in enumerate(find_edges(graph.x, num_neighbours))
        for m in others
    }
    pairs = [tuple(pair) for pair in edges.t().tolist()]
    assert set(pairs) == expected and len(pairs) == len(expected)


def test_graphs_without_nodes_have_no_edges_and_logits_of_their_own():
    batch = torch.tensor([0, 0, 2, 2])  # none of graph 1
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    net = build()
    without = net(x, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(net(x, batch)[[0, 2]], without, **EXACT)
    torch.testing.assert_close(net(x, batch)[1], net.head.mlp(x.new_zeros(8)), **EXACT)


# Each graph by itself


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize("sizes, grid", [(UNEQUAL, None), ([12, 12, 12], GRID)])
def test_logits_and_gradients_do_not_depend_on_the_other_graphs(conv, sizes, grid):
    net, graphs = build(conv=conv, grid=grid), draw_graphs(sizes, 3)

    def run(some):
        net.zero_grad()
        batch = join(some)
        logits = net(batch.x, batch.batch)
        logits.square().sum().backward()
        return logits.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None]

    logits, gradients = run(graphs)
    apart = [run([graph]) for graph in graphs]
    torch.testing.assert_close(logits, torch.cat([one for one, _ in apart]), **EXACT)
    for whole, *parts in zip(gradients, *(parts for _, parts in apart), strict=True):
        torch.testing.assert_close(whole, sum(parts), **EXACT)
    backwards = join(graphs[::-1])
    torch.testing.assert_close(net(backwards.x, backwards.batch).flip(0), logits, **EXACT)


def test_pixel_vigs_logits_do_not_depend_on_the_other_graphs():
    net, graphs = build_pixels(), draw_graphs([4, 1, 6], 3)
    whole = join(graphs)
    logits = net(whole.x, whole.edge_index, whole.batch)
    for graph, row in zip(graphs, logits, strict=True):
        alone = join([graph])
        torch.testing.assert_close(net(alone.x, alone.edge_index, alone.batch)[0], row, **EXACT)


def test_order_of_the_nodes_of_a_graph_is_of_no_account_without_a_grid():
    net, graphs = build(), draw_graphs([7, 5], 3)
    batch = join(graphs)
    order = torch.tensor([3, 0, 6, 2, 1, 5, 4, 8, 11, 10, 7, 9])
    torch.testing.assert_close(net(batch.x[order], batch.batch), net(batch.x, batch.batch), **EXACT)


def test_batch_norm_looks_across_images_in_training_only():
    net, images = build(norm="batch", grid=GRID), draw_images(3, GRID, 3)
    batch, alone = join(images), join(images[:1])
    assert not torch.allclose(net(batch.x, batch.batch)[0], net(alone.x, alone.batch)[0])
    net.eval()
    torch.testing.assert_close(net(batch.x, batch.batch)[:1], net(alone.x, alone.batch), **EXACT)


# Sizes and shapes


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
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_every_parameter_gets_a_gradient(conv, norm):
    net, batch = build(conv=conv, norm=norm, grid=GRID, dropout=0.1), join(draw_images(4, GRID, 3))
    logits = net(batch.x, batch.batch)
    assert logits.shape == (4, 4)
    logits.square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_images_that_fill_no_grid_are_refused():
    with pytest.raises(ValueError, match=r"Expected images of 3 x 4 nodes each \(got 13 nodes\)"):
        build(grid=GRID)(torch.zeros(13, 3).double(), torch.zeros(13).long())


# Traceable


@pytest.mark.parametrize("conv", CONVS)
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("grid", [None, GRID])
def test_vig_traced_for_one_batch_computes_another(conv, norm, grid):
    net = build(conv=conv, norm=norm, grid=grid).eval()
    first, other = join(draw_images(2, GRID, 3)), join(draw_images(5, GRID, 3, seed=1))
    traced = trace_net(net, first.x, first.batch)
    for batch in (first, other):
        assert torch.equal(traced(batch.x, batch.batch), net(batch.x, batch.batch))


def test_pixel_vig_traced_for_one_batch_computes_another():
    net = build_pixels()
    first, other = join(draw_graphs([4, 6], 3)), join(draw_graphs([2, 9, 5], 3, seed=1))
    traced = trace_net(net, first.x, first.edge_index, first.batch)
    args = other.x, other.edge_index, other.batch
    assert torch.equal(traced(*args), net(*args))


# Learning


def learn_digits(net: nn.Module, num_steps: int) -> list[float]:
    """Train on 64 of scikit-learn's digits at a time, in patches of 2 x 2; return the losses."""
    pixels, labels = load_digits(return_X_y=True)
    patches = torch.from_numpy(pixels).view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
    x, y = (patches / 8 - 1).float(), torch.from_numpy(labels).long()
    edge_index, _ = remove_self_loops(join_grid(4, 4)[0])
    edge_index = torch.cat([edge_index + 16 * n for n in range(64)], dim=1)
    batch = torch.arange(64).repeat_interleave(16)
    edges = [edge_index] if isinstance(net, PixelViG) else []
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    draw = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(num_steps):
        some = torch.randint(len(y), (64,), generator=draw)
        loss = F.cross_entropy(net(x[some].flatten(0, 1), *edges, batch), y[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_vig_learns_digits(norm):
    torch.manual_seed(0)
    losses = learn_digits(ViG(4, 24, 10, 2, grid=(4, 4), norm=norm), 90)
    assert losses[0] > 2.0
    assert sum(losses[-5:]) / 5 < 0.7


def test_pixel_vig_learns_digits():
    torch.manual_seed(0)
    widths = dict(grapher_channels=32, feed_forward_channels=32, head_channels=64)
    losses = learn_digits(PixelViG(4, 10, 2, **widths), 90)
    assert sum(losses[-5:]) / 5 < 2.0  # chance is log(10) = 2.3

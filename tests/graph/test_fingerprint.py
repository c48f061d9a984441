from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_gnnpipe.graph import tensor_fingerprint
from tests.graph.strategies import multigraphs, power_law


@given(multigraphs())
@settings(max_examples=100)
def test_any_changed_edge_changes_the_fingerprint(graph: tuple[Tensor, int]) -> None:
    edge_index, _ = graph
    before = tensor_fingerprint(edge_index)
    assert tensor_fingerprint(edge_index.clone()) == before
    for row, column in itertools.product(range(2), range(edge_index.size(1))):
        changed = edge_index.clone()
        changed[row, column] += 1
        assert tensor_fingerprint(changed) != before


@given(multigraphs())
@settings(max_examples=50)
def test_any_swap_of_unequal_edges_changes_it(graph: tuple[Tensor, int]) -> None:
    edge_index, _ = graph
    before = tensor_fingerprint(edge_index)
    for i, j in itertools.combinations(range(edge_index.size(1)), 2):
        order = torch.arange(edge_index.size(1))
        order[i], order[j] = j, i
        swapped = edge_index[:, order]
        assert (tensor_fingerprint(swapped) == before) == swapped.equal(edge_index)


def test_large_graphs_differ_by_direction_end_and_length() -> None:
    edges = power_law(1000, 200_000)
    last = edges.clone()
    last[0, -1] ^= 1
    others = [edges.flip(0), edges.flip(1), edges[:, :-1], edges.roll(65536, 1), last]
    numbers = {tensor_fingerprint(other) for other in [edges, *others]}
    assert len(numbers) == 6


def test_fingerprints_fit_a_tensor_of_int64() -> None:
    numbers = [tensor_fingerprint(power_law(50, 90, seed)) for seed in range(40)]
    numbers += [tensor_fingerprint(torch.full((3,), float(seed))) for seed in range(40)]
    assert torch.tensor(numbers).tolist() == numbers
    assert len(set(numbers)) == 80


def test_every_mask_of_ten_nodes_has_its_own_fingerprint() -> None:
    masks = list(itertools.product([False, True], repeat=10))
    assert len({tensor_fingerprint(torch.tensor(mask)) for mask in masks}) == len(masks)


def test_every_labelling_of_five_nodes_has_its_own_fingerprint() -> None:
    labels = list(itertools.product(range(4), repeat=5))
    assert len({tensor_fingerprint(torch.tensor(label)) for label in labels}) == len(labels)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_a_changed_sign_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 9).to(dtype)
    for place in range(8):
        changed = tensor.clone()
        changed[place] *= -1
        assert tensor_fingerprint(changed) != tensor_fingerprint(tensor)


def test_nan_and_infinity_are_told_apart_by_bits() -> None:
    values = [torch.tensor([v]) for v in (0.0, -0.0, float("nan"), float("inf"))]
    assert len({tensor_fingerprint(value) for value in values}) == 4
    assert tensor_fingerprint(values[2]) == tensor_fingerprint(values[2].clone())


def test_shape_and_dtype_count() -> None:
    zeros = [torch.zeros(shape) for shape in ((6,), (2, 3), (3, 2), (1, 6), (0,), (0, 1), ())]
    zeros += [torch.zeros(6, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.bool)]
    assert len({tensor_fingerprint(tensor) for tensor in zeros}) == len(zeros)


def test_a_transposed_view_is_read_in_its_own_order() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert tensor_fingerprint(tensor.t()) == tensor_fingerprint(tensor.t().contiguous())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(70_001,), (3_001, 129), (3, 1_500_001)])
def test_any_change_of_a_large_tensor_changes_its_fingerprint(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 2, size, generator=generator).to(dtype)
    numbers = {tensor_fingerprint(tensor)}
    places = torch.randint(0, tensor.numel(), (20,), generator=generator).tolist()
    for place in (0, -1, *places):
        changed = tensor.clone()
        changed.view(-1)[place] = 1 - changed.view(-1)[place].int()
        numbers.add(tensor_fingerprint(changed))
    flat = tensor.view(-1)
    others = [flat.roll(1), flat.roll(4096), flat.flip(0)]
    others += [flat[torch.randperm(flat.numel(), generator=generator)] for _ in range(5)]
    numbers |= {tensor_fingerprint(other.view(size)) for other in others}
    assert len(numbers) == 1 + 22 + 8


def test_two_changed_signs_are_seen() -> None:
    """They are the top bits of words."""
    tensor = torch.ones(40_000)
    numbers = {tensor_fingerprint(tensor)}
    for i, j in itertools.combinations((1, 3, 8193, 8195, 16385, 39_999), 2):
        changed = tensor.clone()
        changed[[i, j]] = -1
        numbers.add(tensor_fingerprint(changed))
    assert len(numbers) == 1 + 15


def test_a_view_of_a_large_tensor_is_read_in_its_own_order() -> None:
    table = torch.arange(3_000_000.0).view(1000, 3000)
    for view in (table.t(), table[:, 1:], table[1:, :7], table.bool()[3:, 1:], table[5, 1:]):
        assert tensor_fingerprint(view) == tensor_fingerprint(view.clone().contiguous())

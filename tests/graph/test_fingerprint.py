from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightning_gnnpipe.graph.fingerprint import tensor_fingerprint
from tests.graph.strategies import power_law

FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16
LARGE = power_law(1000, 200_000)
SHAPES = ((6,), (2, 3), (3, 2), (1, 6), (0,), (0, 1), ())
SIGNED = [torch.ones(8), *(1 - 2 * torch.eye(8))]
PAIRS = itertools.combinations((1, 3, 8193, 8195, 16385, 39_999), 2)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.tensor(mask) for mask in itertools.product([False, True], repeat=10)],
        [torch.tensor(labels) for labels in itertools.product(range(4), repeat=5)],
        [torch.tensor([value]) for value in (0.0, -0.0, float("nan"), float("inf"))],
        [
            *(torch.zeros(shape) for shape in SHAPES),
            *(torch.zeros(6, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.bool)),
        ],
        [LARGE, LARGE.flip(0), LARGE.flip(1), LARGE[:, :-1], LARGE.roll(65536, 1)],
        [power_law(50, 90, seed) for seed in range(40)],
        [one.to(dtype) for one in SIGNED for dtype in (*FLOATS, torch.complex64)],
        [torch.ones(40_000).index_fill(0, torch.tensor(one).long(), -1) for one in ([], *PAIRS)],
    ],
    ids=["masks", "labels", "bits", "shapes and dtypes", "order", "graphs", "sign", "top bits"],
)
def test_each_has_its_own_fingerprint(tensors: list[Tensor]) -> None:
    numbers = [tensor_fingerprint(tensor) for tensor in tensors]
    assert len(set(numbers)) == len(tensors)
    assert torch.tensor(numbers).tolist() == numbers  # they fit a tensor of int64
    assert all(tensor_fingerprint(one) == tensor_fingerprint(one.clone()) for one in tensors[:9])


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(70_001,), (3_001, 129), (3, 1_500_001)])
def test_any_change_of_a_large_tensor_changes_its_fingerprint(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 2, size, generator=generator).to(dtype)
    places = torch.randint(0, tensor.numel(), (20,), generator=generator).tolist()
    numbers = {tensor_fingerprint(tensor)}
    for place in (0, -1, *places):
        changed = tensor.clone()
        changed.view(-1)[place] = 1 - changed.view(-1)[place].int()
        numbers.add(tensor_fingerprint(changed))
    flat = tensor.view(-1)
    others = [flat.roll(1), flat.roll(4096), flat.flip(0)]
    others += [flat[torch.randperm(flat.numel(), generator=generator)] for _ in range(5)]
    numbers |= {tensor_fingerprint(other.view(size)) for other in others}
    assert len(numbers) == 1 + 22 + 8


def test_a_view_is_read_in_its_own_order() -> None:
    table, small = torch.arange(3_000_000.0).view(1000, 3000), torch.arange(12.0).view(3, 4)
    views = (table.t(), table[:, 1:], table[1:, :7], table.bool()[3:, 1:], table[5, 1:], small.t())
    for view in views:
        assert tensor_fingerprint(view) == tensor_fingerprint(view.clone().contiguous())

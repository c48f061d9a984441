"""Sums of rows: on the CPU, and by the GPU's kernel, which Triton's interpreter runs."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_gnnpipe.passing import sparse
from lightning_gnnpipe.passing.sparse import SparseRows, multiply

NAME = "lightning_gnnpipe.passing.row_sums"
COUNTS = torch.tensor([3, 0, 40, 1, 8, 9, 0, 17, 0])  # entries by row
NUM_COLUMNS = 11
CPU = torch.device("cpu")
CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def row_sums(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "LONGEST", 8)
    return module


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> list[Callable[[SparseRows, torch.Tensor], Any]]:
    """Return the product on the CPU, and the GPU's if Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return [multiply]
    return [multiply, request.getfixturevalue("row_sums").sum_rows]


@pytest.mark.some_cases(12)
@pytest.mark.parametrize("has_values", [True, False])
@pytest.mark.parametrize("channels", [1, 5, 130])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("counts", [COUNTS, COUNTS.clamp(max=8)], ids=["long rows", "short rows"])
def test_sums_equal_float64_under_autocast_too(
    kernels: list[Callable[[SparseRows, torch.Tensor], Any]],
    counts: torch.Tensor,
    dtype: torch.dtype,
    channels: int,
    has_values: bool,
) -> None:
    torch.manual_seed(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    indices = torch.randint(NUM_COLUMNS, (int(offsets[-1]),))
    values = torch.randn(indices.numel()).to(dtype) if has_values else None
    table = torch.randn(NUM_COLUMNS, channels).to(dtype)
    index_dtype = torch.int64 if dtype == torch.float16 else torch.int32
    rows = SparseRows(offsets.to(index_dtype), indices.to(index_dtype), values)
    entries = table.double()[indices]
    if values is not None:
        entries *= values.double().unsqueeze(1)
    expected = torch.zeros(counts.numel(), channels, dtype=torch.float64)
    expected.index_add_(0, torch.arange(counts.numel()).repeat_interleave(counts), entries)
    scale = float(expected.abs().max())
    for sum_rows, is_cast in product(kernels, (False, True)):  # cast with the cuts of the first
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            found = sum_rows(rows, table)
        assert found.dtype == dtype and found.shape == expected.shape
        assert not found._is_view()  # layers may write to it
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=CLOSE[dtype] * scale)


@pytest.mark.parametrize(("num_rows", "channels"), [(4, 3), (0, 3), (4, 0)])
def test_nothing_to_sum(row_sums: ModuleType, num_rows: int, channels: int) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    rows = SparseRows(torch.zeros(num_rows + 1, dtype=torch.int32), none, None)
    found = row_sums.sum_rows(rows, torch.ones(2, channels))
    assert torch.equal(found, torch.zeros(num_rows, channels))


def test_pieces_of_halves_are_summed_in_float32(row_sums: ModuleType) -> None:
    table = torch.tensor([[30_000.0], [-30_000.0]], dtype=torch.float16)
    indices = torch.tensor([0] * 8 + [1] * 8, dtype=torch.int32)  # the first piece overflows a half
    found = row_sums.sum_rows(SparseRows(torch.tensor([0, 16]), indices, None), table)
    assert found.item() == 0.0


def test_other_errors_of_a_gpu_are_raised(
    row_sums: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(row_sums, "sum_rows", full)
    sparse._gpu_kernel.cache_clear()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            sparse._gpu_kernel(CPU)


def test_without_a_gpus_kernel_a_warning_says_once_what_it_costs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse._gpu_kernel.cache_clear()
    monkeypatch.setitem(sys.modules, NAME, None)
    with caplog.at_level(logging.WARNING):
        assert sparse._gpu_kernel(CPU) is sparse._gpu_kernel(CPU) is None
    assert len(caplog.messages) == 1 and "Install triton" in caplog.text
    sparse._gpu_kernel.cache_clear()


def test_on_a_gpu_products_go_through_the_kernel(
    row_sums: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = SparseRows(
        torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1]), torch.tensor([1.0, 2.0, 3.0])
    )
    table = torch.tensor([[1.0], [10.0]])
    expected = multiply(rows, table)
    calls = []

    def kernel(rows: SparseRows, table: torch.Tensor) -> torch.Tensor:
        calls.append(table.shape)
        result: torch.Tensor = row_sums.sum_rows(rows, table)
        return result

    class OnGpu(torch.Tensor):
        is_cuda = property(lambda self: True)  # type: ignore[assignment]

    monkeypatch.setattr(sparse, "_gpu_kernel", lambda device: kernel)
    found = multiply(rows, table.as_subclass(OnGpu))
    assert calls and torch.equal(found.as_subclass(torch.Tensor), expected)

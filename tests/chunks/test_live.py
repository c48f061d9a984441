"""Bytes of tensors are counted while they live: views and writes in place make none."""

from __future__ import annotations

import torch

from lightning_gnnpipe.chunks.live import LiveBytes

N = 256  # float32 numbers, 1 KiB


def test_tensors_count_until_nothing_refers_to_them() -> None:
    outside = torch.zeros(N)
    with LiveBytes() as live:
        first = torch.ones(N)
        assert live.now == 4 * N
        second = (first + outside).reshape(2, -1)  # the sum lives on in its view
        assert live.now == 8 * N
        second.mul_(2)
        outside.add_(1)
        assert live.now == 8 * N
        del first
        assert live.now == 4 * N
        torch.cat((second, second))  # lives at no time after it
        assert live.now == 4 * N
        del second
    assert (live.now, live.most) == (0, 12 * N)


def test_backward_counts() -> None:
    """The gradient of the sum is a view; of the product, a tensor for each factor."""
    a, b = (torch.ones(N, requires_grad=True) for _ in range(2))
    with LiveBytes() as live:
        found = torch.autograd.grad((a * b).sum(), (a, b))
        assert live.now == 8 * N and len(found) == 2
    assert 8 * N <= live.most <= 12 * N + 8

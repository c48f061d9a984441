"""The two functions that PyG's SplineConv takes from pyg-lib, in plain torch.

Written from the definition of B-splines of degree 1: in each dimension kernel i is the hat of width
1 around knot i. An open spline has its first and last knot at the ends of [0, 1], a closed one is
periodic.
"""

from __future__ import annotations

import torch
from torch import Tensor


def spline_basis(
    pseudo: Tensor, kernel_size: Tensor, is_open_spline: Tensor, degree: int
) -> tuple[Tensor, Tensor]:
    """Return the value of every kernel at each edge, `[num_edges, num_kernels]`, and its number.

    Args:
        pseudo: `[num_edges, num_dims]` coordinates between 0 and 1.
        kernel_size: `[num_dims]` kernels in each dimension; the first dimension counts fastest.
        is_open_spline: `[num_dims]` 1 where splines are open, 0 where they are closed.
        degree: 1.
    """
    assert degree == 1
    basis = pseudo.new_ones(pseudo.size(0), 1)
    for dim, (size, is_open) in enumerate(
        zip(kernel_size.tolist(), is_open_spline.tolist(), strict=True)
    ):
        place = pseudo[:, dim : dim + 1] * (size - is_open)
        distance = (place - torch.arange(size)).abs()
        if not is_open:
            distance = torch.minimum(distance, size - distance)
        hats = (1 - distance).clamp(min=0)
        basis = (hats[:, :, None] * basis[:, None, :]).flatten(1)
    return basis, torch.arange(basis.size(1)).expand_as(basis)


def spline_weighting(x: Tensor, weight: Tensor, basis: Tensor, weight_index: Tensor) -> Tensor:
    """Return `[num_edges, out_channels]`: each row of `x` times its mixture of weights.

    Args:
        x: `[num_edges, in_channels]`.
        weight: `[num_kernels, in_channels, out_channels]`.
        basis: `[num_edges, S]` factors.
        weight_index: `[num_edges, S]` numbers of the weights.
    """
    return torch.einsum("ei,es,esio->eo", x, basis, weight[weight_index])

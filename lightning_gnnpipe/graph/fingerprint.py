"""Telling graphs and batches apart by content, quickly."""

from __future__ import annotations

import torch
from torch import Tensor

_PRIME = 0x9E3779B1
# As signed 64-bit integers.
_FACTORS = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))
_MASK = (1 << 63) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def graph_fingerprint(edge_index: Tensor, num_nodes: int) -> int:
    """Return a 63-bit number that depends on every edge, the order of the edges and `num_nodes`.

    Args:
        edge_index: `[2, num_edges]` integers.
        num_nodes: Nodes, N.
    """
    source, target = edge_index.long()
    place = torch.arange(source.numel(), device=source.device)
    mixed = _mix(_mix(source * num_nodes + target) + place)
    return (int(mixed.sum()) * 31 + num_nodes * _PRIME + source.numel()) & _MASK


def tensor_fingerprint(tensor: Tensor, max_elements: int = 4096) -> int:
    """Return a 63-bit number of the shape, the dtype and a sample of the content of `tensor`.

    Args:
        tensor: Any dense tensor.
        max_elements: Elements that are read, evenly spaced.
    """
    number = sum(ord(letter) << (7 * (i % 8)) for i, letter in enumerate(str(tensor.dtype)))
    for size in tensor.shape:
        number = (number * 1_000_003 + size + 1) & _MASK
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return number
    places = torch.arange(min(max_elements, flat.numel()), device=flat.device)
    sample = flat[places * (flat.numel() - 1) // max(places.numel() - 1, 1)].contiguous()
    if sample.is_complex():
        sample = torch.view_as_real(sample).reshape(-1)
    bits = sample.view(_BITS[sample.element_size()]).long()
    mixed = _mix(_mix(bits) + torch.arange(bits.numel(), device=bits.device))
    return (number * 31 + int(mixed.sum())) & _MASK


def _mix(numbers: Tensor) -> Tensor:
    """Return 64-bit integers in which every bit depends on all bits of `numbers`.

    Source: the finalizer of MurmurHash3 (shifts are arithmetic here).
    """
    for factor in _FACTORS:
        numbers = (numbers ^ (numbers >> 33)) * factor
    return numbers ^ (numbers >> 33)

"""Telling graphs and batches apart by content, quickly.

Multilinear hashing: each value times a random-looking 64-bit number of its own place, summed modulo
2^64. Source: Carter and Wegman, Universal classes of hash functions (1979). The values are small
(node numbers, bytes), so that no change drops out at the top of a 64-bit product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 15  # Values at a time: they stay in the cache, and torch starts no threads for them.
_LARGE_BLOCK = 1 << 23  # bytes
_WIDTH = 1 << 13  # 64-bit words at a time: likewise
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def graph_fingerprint(edge_index: Tensor, num_nodes: int, edge_sizes: Sequence[int] = ()) -> int:
    """Return a signed 64-bit number that depends on every edge, their order and `num_nodes`.

    Args:
        edge_index: `[2, num_edges]` integers of any width.
        num_nodes: Nodes, N.
        edge_sizes: Edges in each of several edge sets, which follow each other.
    """
    sizes = [num_nodes, edge_index.size(1), *edge_sizes]
    return fold([*sizes, _hash(edge_index[0]), _hash(edge_index[1])])


def tensor_fingerprint(tensor: Tensor) -> int:
    """Return a signed 64-bit number of shape, dtype and content, bit by bit.

    Args:
        tensor: Any dense tensor; one that is not contiguous is copied block by block.
    """
    header = [*str(tensor.dtype).encode(), tensor.dim(), *tensor.shape]
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    if rows.numel() == 0:
        return fold(header)
    height = max(_LARGE_BLOCK // (rows[0].numel() * rows.element_size()), 1)
    return fold([*header, *(_hash(_words(block)) for block in torch.split(rows, height))])


def _words(block: Tensor) -> Tensor:
    """Return 32-bit words that depend on every byte of `block`: fewer, where there are many.

    Roughly: the bytes are a table of 64-bit words, 8192 in a row. Each column is folded into one
    word, from the first row to the last.
    """
    given = block.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    if given.storage_offset() % 8:
        given = given.clone()
    num_words = given.numel() // 8
    words, rest = given[: 8 * num_words].view(torch.int64), given[8 * num_words :].int()
    height = num_words // _WIDTH
    folded = words.new_zeros(_WIDTH if height else 0)
    for row in torch.split(words[: height * _WIDTH], _WIDTH) if height else ():
        folded = torch.add(row, folded ^ (folded >> 31), alpha=_signed(_MULTIPLIER))
    return torch.cat([torch.cat([folded, words[height * _WIDTH :]]).view(torch.int32), rest])


def text_fingerprint(text: str) -> int:
    """Return a signed 64-bit number of a text, the same in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _hash(values: Tensor) -> int:
    """Return a number of `[num_values]` integers and their order."""
    keys = _keys(min(_BLOCK, values.numel()), values.device)
    blocks = torch.split(values, _BLOCK)
    sums = [(block.long() * keys[: block.numel()]).sum() for block in blocks]
    return fold(torch.stack(sums).tolist())


def _keys(count: int, device: torch.device) -> Tensor:
    """Return `[count]` random-looking numbers, the same everywhere.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014), mix64.
    """
    keys = torch.arange(1, count + 1, device=device) * _signed(_MULTIPLIER)
    keys = (keys ^ (keys >> 30)) * _signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> 27)) * _signed(0x94D049BB133111EB)
    return keys ^ (keys >> 31)


def fold(numbers: Iterable[int]) -> int:
    """Return one signed 64-bit number of several and their order."""
    numbers = list(numbers)
    folded = len(numbers)
    for number in numbers:
        folded = (folded ^ number) * _MULTIPLIER & _MASK
        folded ^= folded >> 32
    return _signed(folded)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number

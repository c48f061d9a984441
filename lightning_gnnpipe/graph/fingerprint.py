"""Fingerprints of graphs and tensors, by identity and version first, then by content.

Content is hashed by multilinear hashing: each value times a random-looking 64-bit number of its
place, summed modulo 2^64. The values are small (node numbers, bytes), so that no change drops out
at the top of a 64-bit product.

Source: Carter and Wegman, Universal classes of hash functions (1979).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import version_of


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`: in mappings, lists, tuples and PyG's graphs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for name in value:
            yield from tensors_in(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "to_dict"):
        yield from tensors_in(value.to_dict())


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


_NUM_SAMPLED = 1024


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor whose number was taken.

    Attributes:
        tensor: The tensor, for as long as anything else keeps it.
        version: How often it had been written to.
        sample: Some of its elements; None where writes that torch does not count are not looked
            for.
        number: Its number.
    """

    tensor: weakref.ref[Tensor]
    version: int
    sample: Tensor | None
    number: int


class ContentNumbers:
    """Numbers of tensors by shape, dtype and content, the same in every process.

    torch does not count writes through `Tensor.data` or a NumPy array of the same memory. On the
    CPU a sample of the elements is compared as well, which finds those that change many of them.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, tensor: Tensor) -> int:
        """Return a signed 64-bit number of a dense tensor of any shape."""
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            version = version_of(tensor)
            is_same = version == known.version and version >= 0
            if is_same and (known.sample is None or torch.equal(known.sample, sample_of(tensor))):
                return known.number
        number = tensor_fingerprint(tensor)
        self._keep(tensor, number)
        return number

    def _keep(self, tensor: Tensor, number: int) -> None:
        key, known = id(tensor), self._known

        def forget(ref: weakref.ref[Tensor]) -> None:
            if key in known and known[key].tensor is ref:
                del known[key]

        sample = sample_of(tensor).clone() if tensor.device.type == "cpu" else None
        known[key] = _Known(weakref.ref(tensor, forget), version_of(tensor), sample, number)


def sample_of(tensor: Tensor) -> Tensor:
    """Return some elements of the tensor, spread over all of it, bit by bit."""
    flat = tensor.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat.flatten()
    step = max(1, -(-flat.numel() // _NUM_SAMPLED))
    while gcd(step, flat.numel()) > 1 and step < flat.numel():
        step += 1  # or it would see the same columns of all rows
    return _bits(flat[::step])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(values: Tensor) -> Tensor:
    """Return `[num_values]` as integers: a NaN equals itself then, and -0.0 is not 0.0."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype is torch.bool or not values.is_floating_point():
        return values
    return values.contiguous().view(_INTEGERS[values.element_size()])

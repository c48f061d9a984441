"""Fingerprints of graphs and tensors by content, cached by identity and version.

Multilinear hash: the sum of each value times a pseudorandom 64-bit key of its place, modulo 2^64.
The values are small (node numbers, bytes), so that no change is lost to overflow.
Source: Carter and Wegman, Universal classes of hash functions (1979).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_gnnpipe._compat_torch import version_of


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists, tuples and PyG graphs, in order."""
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


_BLOCK = 1 << 15  # values per block: it stays in the cache, and torch starts no threads
_LARGE_BLOCK = 1 << 23  # bytes
_WIDTH = 1 << 13  # 64-bit words per row: likewise
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def tensor_fingerprint(tensor: Tensor) -> int:
    """Return a signed 64-bit hash of the shape, dtype and bits of a dense tensor."""
    header = [*str(tensor.dtype).encode(), tensor.dim(), *tensor.shape]
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    if rows.numel() == 0:
        return fold(header)
    height = max(_LARGE_BLOCK // (rows[0].numel() * rows.element_size()), 1)
    return fold([*header, *(_hash(_words(block)) for block in torch.split(rows, height))])


def _words(block: Tensor) -> Tensor:
    """Return 32-bit words that depend on every byte of `block`; fewer words if it is large.

    Roughly: view the bytes as rows of 8192 64-bit words, and fold each column into one word.
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
    """Return a signed 64-bit hash of a text, the same in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _hash(values: Tensor) -> int:
    keys = _keys(min(_BLOCK, values.numel()), values.device)
    blocks = torch.split(values, _BLOCK)
    sums = [(block.long() * keys[: block.numel()]).sum() for block in blocks]
    return fold(torch.stack(sums).tolist())


def _keys(count: int, device: torch.device) -> Tensor:
    """Return `[count]` pseudorandom numbers, the same on every machine."""
    # Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014), mix64.
    keys = torch.arange(1, count + 1, device=device) * _signed(_MULTIPLIER)
    keys = (keys ^ (keys >> 30)) * _signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> 27)) * _signed(0x94D049BB133111EB)
    return keys ^ (keys >> 31)


def fold(numbers: Iterable[int]) -> int:
    """Return a signed 64-bit hash of numbers in order."""
    numbers = list(numbers)
    folded = len(numbers)
    for number in numbers:
        folded = (folded ^ number) * _MULTIPLIER & _MASK
        folded ^= folded >> 32
    return _signed(folded)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_NUM_SAMPLED = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Known(NamedTuple):
    version: int  # count of writes
    sample: Tensor | None  # None off the CPU
    fingerprint: int


_NUMBER = "content_number"  # attribute of a tensor whose content is known


def set_number(tensor: Tensor, fingerprint: int) -> Tensor:
    """Return `tensor` with its fingerprint, which is then used until somebody writes to it."""
    setattr(tensor, _NUMBER, _Known(version_of(tensor), sample_of(tensor).clone(), fingerprint))
    return tensor


class ContentNumbers:
    """Cached fingerprints of tensors, the same in every process.

    torch does not count writes through `Tensor.data` or a NumPy array of the same memory. On the
    CPU, comparing a sample of the elements detects those that change many of them.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, _Known] = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> int:
        """Return the fingerprint of a dense tensor, a signed 64-bit number."""
        known, version = self._known.get(tensor, getattr(tensor, _NUMBER, None)), version_of(tensor)
        if (
            known is not None
            and known.version == version >= 0
            and (known.sample is None or torch.equal(known.sample, sample_of(tensor)))
        ):
            return known.fingerprint
        sample = sample_of(tensor).clone() if tensor.device.type == "cpu" else None
        fingerprint = tensor_fingerprint(tensor)
        self._known[tensor] = _Known(version, sample, fingerprint)
        return fingerprint


def sample_of(tensor: Tensor) -> Tensor:
    """Return up to 1024 elements, spread over the whole tensor, as exact bit patterns."""
    flat = tensor.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat.flatten()
    step = max(1, -(-flat.numel() // _NUM_SAMPLED))
    while gcd(step, flat.numel()) > 1 and step < flat.numel():
        step += 1  # else it may sample the same columns of all rows
    values = flat[::step]
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        return values
    # As integers NaN equals NaN, and -0.0 differs from 0.0.
    return values.contiguous().view(_INTEGERS[values.element_size()])

"""A codec of few bits for all rows, and one of more for the longest.

Gradients of nodes differ by factors of thousands in length: a few rows, near nodes that have
labels, are nearly all of a message, and their errors nearly all of the error. One row in 32 with
more bits costs little::

    payload = all rows by `rest` | [k] numbers of rows, int32 | those rows by `long`
    k       = num_rows // 32

each padded to 8 bytes but the last. Rows of more than 256 channels are cut into parts as equal as
can be, the last one filled up by zeros, and each part counts as a row.

Both codecs are unbiased, and which rows are long is not left to chance, so the whole is unbiased.

Source: what is largest is sent apart in Deep Gradient Compression (arXiv 1712.01887), too; here
with few bits of all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnnpipe.comm.payload import Codec
from lightning_gnnpipe.comm.rows import ceil_div, count_rows

_ROWS_PER_LONG = 32
_INDEX_BYTES = 4
_MOST_CHANNELS = 256


class LongRowsCodec(Codec):
    """Sends all rows by one codec, and the longest by another too.

    Args:
        name: As `get_codec` knows it.
        rest: Of all rows.
        long: Of one row in 32.
    """

    def __init__(self, name: str, rest: Codec, long: Codec) -> None:
        super().__init__(name)
        self._rest, self._long = rest, long

    def _coded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return self._places(shape, dtype).end

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        places = self._places(tensor.shape, tensor.dtype)
        whole = tensor.reshape(places.num_rows // places.num_parts, -1)
        padding = places.num_parts * places.num_channels - whole.size(1)
        if padding:  # or it would be copied for nothing
            whole = F.pad(whole, (0, padding))
        rows = whole.reshape(places.num_rows, -1)
        payload = torch.zeros(places.end, dtype=torch.uint8, device=tensor.device)
        payload[: places.rest].copy_(self._rest.encode(rows, seed))
        if places.num_long:
            indices = _lengths(rows).topk(places.num_long).indices
            payload[places.indices].view(torch.int32).copy_(indices)
            payload[places.long :].copy_(self._long.encode(rows[indices], seed ^ 0x80000000))
        return payload

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        places = self._places(out.shape, out.dtype)
        shape = places.num_rows, places.num_channels
        is_direct = places.num_parts == 1 and out.is_contiguous()
        rows = out.view(shape) if is_direct else out.new_empty(shape)
        self._rest.decode(payload[: places.rest], rows)
        if places.num_long:
            long = rows.new_empty((places.num_long, places.num_channels))
            self._long.decode(payload[places.long :], long)
            rows[payload[places.indices].view(torch.int32).to(torch.int64)] = long
        if not is_direct:
            whole = rows.view(places.num_rows // places.num_parts, -1)
            out.copy_(whole[:, : prod(out.shape[1:])].reshape(out.shape))

    def _places(self, shape: Sequence[int], dtype: torch.dtype) -> _Places:
        num_parts = max(1, ceil_div(prod(shape[1:]), _MOST_CHANNELS))
        num_channels = ceil_div(prod(shape[1:]), num_parts)
        num_rows = count_rows(shape) * num_parts
        num_long = num_rows // _ROWS_PER_LONG
        rest = end = self._rest.payload_bytes((num_rows, num_channels), dtype)
        start = long = _round_up(rest)
        if num_long:
            long = _round_up(start + _INDEX_BYTES * num_long)
            end = long + self._long.payload_bytes((num_long, num_channels), dtype)
        indices = slice(start, start + _INDEX_BYTES * num_long)
        return _Places(num_rows, num_channels, num_parts, num_long, rest, indices, long, end)


class _Places(NamedTuple):
    """What is sent of a tensor, and where in the payload, in bytes.

    Attributes:
        num_rows: Of parts of at most 256 channels.
        num_channels: Of a part.
        num_parts: Of a row.
        num_long: Parts that are sent again.
        rest: Where all parts end.
        indices: Where the numbers of the long ones are.
        long: Where these begin.
        end: Where all ends.
    """

    num_rows: int
    num_channels: int
    num_parts: int
    num_long: int
    rest: int
    indices: slice
    long: int
    end: int


def _lengths(rows: Tensor) -> Tensor:
    """Return the lengths of rows, in a unit in which their squares are numbers of float32."""
    values = rows.to(torch.float32)
    largest = torch.maximum(values.amax(1), values.amin(1).neg())
    unit = largest.nan_to_num(0.0, posinf=0.0).amax().clamp(min=2.0**-126)
    return (values / unit).norm(dim=1)


def _round_up(num_bytes: int) -> int:
    return ceil_div(num_bytes, 8) * 8

"""A codec of few bits for all rows, and one of more for the longest.

Gradients of nodes differ by factors of thousands in length: a few rows, near the nodes with labels,
are nearly all of a message, and their errors nearly all of the error. One row in 32 with more bits
costs little::

    payload = all rows by `rest`, padded to 8 bytes | [k] numbers of rows, int32 | those by `long`
    k       = num_rows // 32

Both codecs are unbiased, and which rows are long is not left to chance, so the whole is unbiased.

Source: sending what is largest apart, as in Deep Gradient Compression (arXiv 1712.01887), here in
addition to few bits of all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnnpipe.comm.payload import Codec

_ROWS_PER_LONG = 32
_INDEX_BYTES = 4


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
        return self._ends(shape, dtype)[-1]

    def _encode(self, tensor: Tensor, seed: int) -> Tensor:
        ends = self._ends(tensor.shape, tensor.dtype)
        payload = torch.empty(ends[-1], dtype=torch.uint8, device=tensor.device)
        rest, padding, indices, long = payload.tensor_split(ends[:-1])
        rest.copy_(self._rest.encode(tensor, seed))
        padding.zero_()
        num_long = _num_long(tensor.shape)
        if num_long:
            lengths = tensor.reshape(tensor.shape[0], -1).to(torch.float32).norm(dim=1)
            rows = lengths.topk(num_long).indices
            indices.view(torch.int32).copy_(rows)
            long.copy_(self._long.encode(tensor[rows], seed))
        return payload

    def _decode(self, payload: Tensor, out: Tensor) -> None:
        ends = self._ends(out.shape, out.dtype)
        rest, _, indices, long = payload.tensor_split(ends[:-1])
        self._rest.decode(rest, out)
        num_long = _num_long(out.shape)
        if num_long:
            rows = out.new_empty((num_long, *out.shape[1:]))
            self._long.decode(long, rows)
            out[indices.view(torch.int32).to(torch.int64)] = rows

    def _ends(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int, int, int]:
        """Return where the rest, its padding, the numbers and the long rows end, in bytes."""
        num_long = _num_long(shape)
        rest = self._rest.payload_bytes(shape, dtype)
        if num_long == 0:
            return rest, rest, rest, rest
        padded = -(-rest // 8) * 8
        indices = padded + _INDEX_BYTES * num_long
        long = self._long.payload_bytes((num_long, *shape[1:]), dtype)
        return rest, padded, indices, indices + long


def _num_long(shape: Sequence[int]) -> int:
    return shape[0] // _ROWS_PER_LONG if len(shape) > 1 else 0

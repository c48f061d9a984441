"""Sums over all nodes outside of layers, on one chunk: `k.t() @ v` in linear attention.

A function is a sum over nodes if its results on parts of the rows add up to that on all rows, maybe
as a mean, or as a root of squares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers.statistics import sum_over_chunks
from lightning_gnnpipe.passing import ChunkMatrix, MessageContext, is_matrix
from lightning_gnnpipe.user_code import is_checkpointed

Key = tuple[str, int]  # name of a function, and its number among calls of this name in a segment

_OfSum = Callable[[Tensor, int], Tensor]
# Pairs: turn a result into something that adds up, and turn the total back. The last pair has
# gradient 0 at 0.
_FORMS: tuple[tuple[_OfSum, _OfSum], ...] = (
    (lambda result, _: result, lambda total, _: total),
    (lambda mean, n: mean * n if n else torch.zeros_like(mean), lambda total, n: total / n),
    (lambda root, _: root.square(), lambda total, _: (total + (total == 0)).sqrt() * (total != 0)),
)
# What code makes of the number of nodes before it meets a tensor.
_COUNTS: tuple[Callable[[int], float], ...]
_COUNTS = (lambda n: n, lambda n: 1 / n, math.sqrt, lambda n: n**-0.5, math.log)


@dataclass(frozen=True, slots=True)
class NodeSum:
    """A function that reduces rows of nodes, or has their number among its operands."""

    dims: tuple[int | None, ...]  # for each operand, the dimension of nodes, if it has one
    # An index into `_FORMS`; or why it is refused; or None: it treats each row by itself.
    form: int | str | None
    # Pairs: an operand, and the index into `_COUNTS` of how it depends on the number of nodes.
    counts: frozenset[tuple[int, int]] = frozenset()

    def merge(self, other: NodeSum | None, *, is_clear: bool) -> NodeSum | None:
        """Return what two trials agree on.

        `is_clear`: the graphs differ in size, so that no constant is taken for the number of nodes.
        """
        if other is None or (self.dims, self.form) != (other.dims, other.form):
            return None
        counts = self.counts & other.counts if is_clear else frozenset()
        return None if self.form is None and not counts else replace(self, counts=counts)


NodeSums = Mapping[Key, NodeSum]


def count_sums(sums: NodeSums) -> Counter[str]:
    """Return how many of `sums` reduce rows, by the name of the function."""
    return Counter(name for (name, _), one in sums.items() if one.form is not None)


class _Operands:
    """The operands of a call, in one list."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._function, self._given = function, (args, kwargs)
        self.values: list[Any] = []
        fx.node.map_aggregate(self._given, self.values.append)

    def call(self) -> Any:
        left = iter(self.values)
        args, kwargs = cast(Any, fx.node.map_aggregate(self._given, lambda _: next(left)))
        return self._function(*args, **kwargs)

    def call_on(self, dims: Sequence[int | None], start: int, count: int) -> Any:
        """Call the function on `count` rows of the operands that have some."""
        part = _Operands(self._function, *self._given)
        pairs = zip(self.values, dims, strict=True)
        part.values = [v if dim is None else v.narrow(dim, start, count) for v, dim in pairs]
        return part.call()


class _Counting(TorchFunctionMode):
    """Numbers the calls of functions."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()

    def _count(self, function: Any, args: Any, *, is_hidden: bool) -> Key | None:
        """Return the key of a call; None for products of sparse matrices, or if `is_hidden`."""
        if is_hidden or any(is_matrix(one) or isinstance(one, ChunkMatrix) for one in args):
            return None
        name = getattr(function, "__name__", "")
        self._calls[name] += 1
        return name, self._calls[name]


class Learner(_Counting):
    """Finds sums over the nodes of a small graph; `num_nodes` differs from all other sizes.

    It tries all functions, so that user code and PyG's attention need no table. It also finds
    operands that are computed from the number of all nodes. Everywhere else `x.size(0)` is the
    number of rows in the chunk.
    """

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.found: dict[Key, NodeSum] = {}
        self._num_nodes, self._depth = num_nodes, 0

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """Look at no functions within the block, which runs a layer or a norm."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key, kwargs = self._count(func, args, is_hidden=self._depth > 0), kwargs or {}
        operands, name = _Operands(func, args, kwargs), "" if key is None else key[0]
        overwrites = name.endswith("_") and (name.startswith("__i") or not name.startswith("__"))
        if overwrites:
            operands.values = [v.clone() if isinstance(v, Tensor) else v for v in operands.values]
        result = func(*args, **kwargs)
        if key is not None and isinstance(result, Tensor) and result.is_floating_point():
            with torch.no_grad(), torch.autocast(result.device.type, enabled=False):
                found = self._learn(operands, result)
            if found is not None and (found.form is None or not overwrites):
                is_again = found.form is not None and is_checkpointed()
                self.found[key] = replace(found, form="in a checkpoint") if is_again else found
        return result

    def _learn(self, operands: _Operands, result: Tensor) -> NodeSum | None:
        n, values = self._num_nodes, operands.values
        dims = tuple(_dim_of(n, value) for value in values)
        places = [dim for dim, size in enumerate(result.shape) if size == n]
        has_rows, half = any(dim is not None for dim in dims), n // 2
        if has_rows and len(places) > 1:
            return NodeSum((), "which returns a value for each pair of nodes")
        is_reduced = has_rows and not places
        row_wise = NodeSum(dims, None, frozenset() if is_reduced else _counts_in(n, values))
        if half == 0 or not (is_reduced or row_wise.counts):
            return None
        if not has_rows:
            return None if places else row_wise
        try:
            operands.values = list(map(_as_test, values, dims))
            whole, first = operands.call(), operands.call_on(dims, 0, half)
            if not is_reduced:
                return row_wise if _is_close(first, whole.narrow(places[0], 0, half)) else None
            pairs = zip(values, dims, strict=True)
            has_mask = any(dim is not None and v.dtype is torch.bool for v, dim in pairs)
            if has_mask and not whole.numel():
                return NodeSum(dims, "with a mask that selects no row in a trial")
            second = operands.call_on(dims, half, n - half)
            if not first.shape == second.shape == whole.shape:  # rows of a mask
                return None
        except Exception:  # the function takes sizes, indices or another number of rows
            return None
        for number, (to_sum, from_sum) in enumerate(_FORMS):
            total = to_sum(first, half) + to_sum(second, n - half)
            if _is_close(from_sum(total, n), whole):
                return NodeSum(dims, number)
        return None


def _dim_of(num_nodes: int, value: Any) -> int | None:
    """Return the dimension of nodes of an operand, if it has one."""
    sizes = list(value.shape) if isinstance(value, Tensor) else []
    return sizes.index(num_nodes) if sizes.count(num_nodes) == 1 else None


def _counts_in(num_nodes: int, values: Sequence[Any]) -> frozenset[tuple[int, int]]:
    """Return `NodeSum.counts` of operands that may be functions of the number of nodes."""
    numbers = [(i, value) for i, value in enumerate(values) if type(value) in (int, float)]
    of_nodes = [(k, function(num_nodes)) for k, function in enumerate(_COUNTS)]
    return frozenset((i, k) for i, v in numbers for k, found in of_nodes if math.isclose(v, found))


def _as_test(value: Any, dim: int | None) -> Any:
    """Return an operand in double precision; random positive rows, of very different sizes."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.double() if dim is None else torch.randn_like(value.double()).exp()


def _is_close(ours: Any, theirs: Tensor) -> bool:
    tolerance = 1e-8 if theirs.dtype == torch.float64 else 1e-3
    is_alike = isinstance(ours, Tensor) and ours.shape == theirs.shape
    return is_alike and bool((ours - theirs).norm() <= tolerance * theirs.norm())


def check_sums(sums: NodeSums) -> None:
    """Refuse functions of all nodes that chunks cannot compute."""
    for (name, _), one in sums.items():
        if isinstance(one.form, str):
            raise UnsupportedError(
                expected="forward to combine rows of all nodes only by sums, as linear attention "
                "does, and not inside torch.utils.checkpoint",
                found=f"'{name}', {one.form}",
                remedy="Softmax attention needs all rows at once: use linear attention, or train "
                "with num_chunks=1. For a checkpoint use GNNPipeStrategy(recompute=True).",
            )


class Summing(_Counting):
    """Runs a segment's `sums` over all nodes on the running chunk of `context`.

    As in norms over all nodes, the sums of chunks that have run in this step are added up, with
    their gradient. The last known sums of other chunks are added, as constants. Exact passes see
    all rows, and store the sums of each chunk.
    """

    def __init__(self, sums: NodeSums, context: Any) -> None:
        super().__init__()
        self._sums, self._context = sums, cast(MessageContext, context)
        self._numbers = count_sums(sums)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        context = self._context
        key = self._count(func, args, is_hidden=context.is_in_layer)
        one = None if key is None else self._sums.get(key)
        if key is None or one is None:
            return func(*args, **(kwargs or {}))
        operands, num_nodes = _Operands(func, args, kwargs or {}), context.whole.num_nodes
        for i, k in one.counts:
            operands.values[i] = type(operands.values[i])(_COUNTS[k](num_nodes))
        result = operands.call()
        if not isinstance(one.form, int):
            return result
        to_sum, from_sum = _FORMS[one.form]

        def sums_of(counts: Sequence[int]) -> Tensor:
            ends = torch.tensor([0, *counts]).cumsum(0).tolist()
            spans = list(zip(ends, counts, strict=False))
            parts = [operands.call_on(one.dims, *span).double() for span in spans]
            return torch.stack([to_sum(part, n) for part, n in zip(parts, counts, strict=True)])

        own = to_sum(result.double(), context.chunk.num_nodes)
        # Where evaluation has more sums than training, it must not replace sums of training.
        name = f"{key[0]}() of {self._numbers[key[0]]}"
        total = sum_over_chunks(name, own, sums_of, context)
        return result if total is None else from_sum(total, num_nodes).to(result.dtype)

"""What a forward asks of shapes while it is traced: the answer becomes part of the trace.

    if h.size(-1) == x.size(-1): h = h + x            widths: the same in every chunk
    if x.size(0) > 1000: h = self.deep(h)             rows: refused
    if h.max() > 1: h = h / 2                         values: refused

Each node runs on two samples as it is traced: sizes that are equal in both are widths.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

_SIZES = {"shape", "size", "numel", "nelement"}
_FACTS = _SIZES | {"ndim", "dim", "ndimension", "dtype", "device", "layout", "requires_grad"}
_FACTS |= {"is_cuda", "is_cpu", "is_sparse", "is_floating_point", "is_complex", "element_size"}
_FACTS |= {"shape_like"}
_INPLACE_FUNCTIONS = {operator.iadd, operator.imul, operator.isub, operator.itruediv}
ANSWER = "answer"  # mark of a node that depends on shapes only
LINE = "line"  # mark: the line of the user's code that made a node
UNKNOWN = "unknown"  # sizes that depend on the graph, and are none of its numbers of rows
WRITES = "writes"  # mark of a node that changed its operands in the sample


@dataclass(frozen=True, slots=True)
class Answer:
    """The value of a node that depends on shapes only.

    `rows`: what its sizes count, in the structure of `value`; None where they count no rows.
    """

    value: Any
    rows: Any = None

    @property
    def is_of_rows(self) -> bool:
        """Whether the value depends on the number of rows of a tensor, or another that varies."""
        return any(self.rows) if isinstance(self.rows, tuple) else self.rows is not None

    @property
    def is_known(self) -> bool:
        return UNKNOWN not in (self.rows if isinstance(self.rows, tuple) else (self.rows,))


def is_of_shapes(node: fx.Node) -> bool:
    """Whether `node` depends on shapes, dtypes and devices of tensors only."""
    return ANSWER in node.meta


def line_of_node(node: fx.Node) -> str:
    """Return the line of the user's code that made `node`; empty if unknown."""
    return str(node.meta.get(LINE, ""))


def _fact_of(node: fx.Node) -> str | None:
    """Return what `node` asks of the tensor that is its only operand, else None."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name == "getattr":
        name = str(node.args[1])
    is_of_one = len(node.all_input_nodes) == 1 and node.args[:1] == (node.all_input_nodes[0],)
    return name if name in _FACTS and is_of_one else None


def answer_to(node: fx.Node, result: Any, rows_of: Callable[[fx.Node], Any]) -> Answer | None:
    """Return `result` as an answer; None if `node` depends on more than shapes.

    `rows_of` returns what the sizes of a tensor count, see `Answer.rows`.
    """
    fact, sources = _fact_of(node), node.all_input_nodes
    if fact in _SIZES:
        shape, dim = Answer(result, rows_of(sources[0])), dim_asked(node)
        if fact in ("numel", "nelement"):
            rows = ("several" if shape.is_known else UNKNOWN) if shape.is_of_rows else None
            return Answer(result, rows)
        return shape if dim is None else Answer(result, _at(shape.rows, dim))
    if fact is not None:
        return Answer(result)
    is_call = node.op in ("call_function", "call_method")
    if not is_call or not sources or not all(map(is_of_shapes, sources)):
        return None
    found = [cast(Answer, one.meta[ANSWER]) for one in sources]
    if not any(one.is_of_rows for one in found):
        return Answer(result)
    if node.target is operator.getitem and len(found) == 1:
        return Answer(result, _at(found[0].rows, node.args[1]))
    if not all(one.is_known for one in found):
        return Answer(result, UNKNOWN)
    is_compared = node.target in (operator.eq, operator.ne) and len(found) == 2
    is_alike = is_compared and found[0].rows == found[1].rows
    return Answer(result, None if is_alike else "several")


def _at(rows: Any, place: Any) -> Any:
    return rows[place] if isinstance(rows, tuple) else rows


def size_asked(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose shape, or size in a dimension, `node` is; else None."""
    return node.all_input_nodes[0] if _fact_of(node) in ("shape", "size") else None


def dim_asked(node: fx.Node) -> Any:
    """Return the dimension whose size `node` asks for; None for all."""
    is_method = node.op == "call_method"
    return node.kwargs.get("dim", node.args[1] if is_method and len(node.args) > 1 else None)


def shape_like(leaf: Tensor, row_shape: tuple[int, ...]) -> torch.Size:
    """Return the shape of a tensor with as many rows as `leaf`, of `row_shape`."""
    return torch.Size((leaf.size(0), *row_shape))


def is_named_write(node: fx.Node) -> bool:
    """Whether the name of a function or method suggests that it overwrites its operand."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return (
        node.kwargs.get("inplace") is True
        or node.target in _INPLACE_FUNCTIONS
        or (name.endswith("_") and not name.endswith("__"))
    )


def place_of(value: Any) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_dense else 0


def needs_grad(value: Any) -> bool:
    """Whether `value` is a tensor that gets a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


class Shaped(fx.Proxy):
    """A tensor or a size of a trace, of which Python may ask what depends on shapes only."""

    __array_ufunc__ = None  # np.float64(2) * h is h.__rmul__

    def __getattr__(self, k: str) -> Any:
        if k == "data" and self._is_leaf:  # writes to it are counted
            return self.detach()
        return _ShapedAttribute(self, k)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "data":
            raise TypeError("'Proxy' object does not support assignment of data")
        super().__setattr__(name, value)

    @property
    def _is_leaf(self) -> bool:
        return self.node.op in ("placeholder", "get_attr") or self.node.target is torch.positive

    def __index__(self) -> int:
        return operator.index(self._ask())

    def __int__(self) -> int:
        return int(self._ask())

    def __float__(self) -> float:
        return float(self._ask())

    def __len__(self) -> int:
        found = self.node.meta.get(ANSWER)
        return super().__len__() if found is None else len(found.value)

    def __format__(self, spec: str) -> str:
        found = self.node.meta.get(ANSWER)
        if found is None or found.is_of_rows:
            return repr(self)
        return format(found.value, spec)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("'Proxy' object does not support item assignment")

    def _ask(self) -> Any:
        return cast(Any, self.tracer).ask(self)


class _ShapedAttribute(fx.proxy.Attribute, Shaped):
    """An attribute of a tensor in a trace, or a method that is to be called."""

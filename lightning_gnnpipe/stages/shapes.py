"""What a forward asks of shapes while it is traced: the answer becomes part of the trace.

    if h.size(-1) == x.size(-1): h = h + x            widths: the same in every chunk
    if x.size(0) > 1000: h = self.deep(h)             rows: refused
    if h.max() > 1: h = h / 2                         values: refused

A trace that meets a question without an answer ends with `UnansweredError`. The graph so far runs
on a sample, which answers all questions about shapes in it, and the forward is traced again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.errors import UnsupportedError

_SIZES = {"shape", "size", "numel", "nelement"}
_FACTS = _SIZES | {"ndim", "dim", "ndimension", "dtype", "device", "layout", "requires_grad"}
_FACTS |= {"is_cuda", "is_cpu", "is_sparse", "is_floating_point", "is_complex", "element_size"}
_FACTS |= {"shape_like"}
_OF_SHAPES = "is_of_shapes"
UNKNOWN = "unknown"  # sizes that depend on the graph, and are none of its numbers of rows


class UnansweredError(BaseException):
    """A trace needs an answer; no `Exception`, which forward may catch."""


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


@dataclass(slots=True)
class Questions:
    """What a forward asks of shapes.

    `learn` answers all questions in a graph, by node name; it gets the root of its targets as well.
    """

    learn: Callable[[fx.Graph, nn.Module], dict[str, Answer]] = lambda graph, root: {}
    answers: dict[str, Answer] = field(default_factory=dict)


def mark(node: fx.Node) -> None:
    """Note in `node` whether it depends on shapes only; its sources must be marked."""
    is_call, sources = node.op in ("call_function", "call_method"), node.all_input_nodes
    is_derived = bool(sources) and all(map(is_of_shapes, sources))
    node.meta[_OF_SHAPES] = is_call and (is_derived or _fact_of(node) is not None)


def is_of_shapes(node: fx.Node) -> bool:
    """Whether `node` depends on shapes, dtypes and devices of tensors only."""
    return bool(node.meta.get(_OF_SHAPES))


def _fact_of(node: fx.Node) -> str | None:
    """Return what `node` asks of the tensor that is its only operand, else None."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name == "getattr":
        name = str(node.args[1])
    is_of_one = len(node.all_input_nodes) == 1 and node.args[:1] == (node.all_input_nodes[0],)
    return name if name in _FACTS and is_of_one else None


class Facts:
    """Answers the questions about shapes in a graph, from runs of it on two samples.

    `count` maps a size to its size in the whole graph and what it counts, or to None. `other`: the
    facts of the other sample; sizes that differ are no widths.
    """

    def __init__(
        self, count: Callable[[int], tuple[int, Any] | None], other: Facts | None = None
    ) -> None:
        self._count, self._other = count, other
        self._shapes: dict[str, Answer] = {}
        self.answers: dict[str, Answer] = {}

    def note(self, node: fx.Node, result: Any) -> None:
        """Note the `result` of `node`; nodes come in the order of the graph."""
        if isinstance(result, Tensor):
            counted = [self._count(size) or (size, None) for size in result.shape]
            if self._other is not None:
                sizes = self._other._shapes[node.name].value
                counted = [
                    (size, UNKNOWN if rows is None and size != other else rows)
                    for (size, rows), other in zip(counted, sizes, strict=True)
                ]
            sizes = torch.Size([size for size, _ in counted])
            self._shapes[node.name] = Answer(sizes, tuple(rows for _, rows in counted))
        if not is_of_shapes(node):
            return
        fact, sources = _fact_of(node), node.all_input_nodes
        if fact in _SIZES and sources[0].name in self._shapes:
            self.answers[node.name] = _size(node, fact, self._shapes[sources[0].name])
        elif fact is not None:
            self.answers[node.name] = Answer(result)
        elif all(one.name in self.answers for one in sources):
            self.answers[node.name] = self._derive(node)

    def _derive(self, node: fx.Node) -> Answer:
        found = [self.answers[one.name] for one in node.all_input_nodes]
        args, kwargs = cast(
            Any, fx.node.map_arg((node.args, node.kwargs), lambda n: self.answers[n.name].value)
        )
        if node.op == "call_method":
            value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            value = cast(Any, node.target)(*args, **kwargs)
        if not any(one.is_of_rows for one in found):
            return Answer(value)
        if node.target is operator.getitem and isinstance(found[0].rows, tuple) and len(found) == 1:
            return Answer(value, found[0].rows[args[1]])
        if not all(one.is_known for one in found):
            return Answer(value, UNKNOWN)
        is_compared = node.target in (operator.eq, operator.ne) and len(found) == 2
        is_alike = is_compared and found[0].rows == found[1].rows
        return Answer(value, None if is_alike else "several")


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


def with_rows(tensor: Tensor, key: Any, value: Any) -> Tensor:
    """Return a copy of `tensor` after `tensor[key] = value`."""
    copy = tensor.clone()
    copy[key] = value
    return copy


def is_shared(
    node: fx.Node, env: Mapping[fx.Node, Any], outside: Iterable[Tensor], done: Iterable[fx.Node]
) -> bool:
    """Whether `node` writes rows of a tensor whose memory a tensor shares that is read later.

    `env`: results of the nodes `done`. `outside`: leaves, parameters and buffers.
    """
    written = cast(fx.Node, node.args[0])
    later = [env[n] for n in env if n is not written and n.users.keys() - {*done}]
    place = _place(env[written])
    return place != 0 and place in map(_place, (*later, *outside))


def _place(value: Any) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_dense else 0


@contextmanager
def refusing_writes(leaves: Sequence[Tensor], names: Sequence[str]) -> Iterator[None]:
    """Refuse writes within the block to leaves that are no arguments."""
    before = list(map(version_of, leaves))
    yield
    for leaf, name, version in zip(leaves, names, before, strict=False):
        if name.startswith("module.") and version_of(leaf) != version:
            raise refuse_write(f"'{name}', which is no argument")


def refuse_write(found: str) -> UnsupportedError:
    """Return the error for a forward that changes more than tensors of its own."""
    return UnsupportedError(
        expected="forward to write only to tensors of its own",
        found=f"a write to {found}",
        remedy="Write to a copy, h = x.clone(), before other tensors are derived from it. Change "
        "what the module holds in hooks such as on_train_batch_start.",
    )


def _size(node: fx.Node, fact: str, shape: Answer) -> Answer:
    """Return the answer to `fact`, a question about the sizes of a tensor of this `shape`."""
    if fact in ("numel", "nelement"):
        rows = ("several" if shape.is_known else UNKNOWN) if shape.is_of_rows else None
        return Answer(shape.value.numel(), rows)
    dim = dim_asked(node)
    return shape if dim is None else Answer(shape.value[dim], shape.rows[dim])


class Shaped(fx.Proxy):
    """A tensor or a size of a trace, of which Python may ask what depends on shapes only."""

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
        found = self._answer()
        return super().__len__() if found is None else len(found.value)

    def __format__(self, spec: str) -> str:
        found = self._answer()
        return repr(self) if found is None else format(found.value, spec)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._is_leaf:
            raise TypeError("'Proxy' object does not support item assignment")
        made = self.tracer.create_proxy("call_function", with_rows, (self, key, value), {})
        self.node = made.node  # from here on the name stands for the new tensor

    def _answer(self) -> Answer | None:
        """Return the answer to this question about shapes; None if it is none, or has none."""
        found = cast(Any, self.tracer).answer(self.node) if is_of_shapes(self.node) else None
        return found if found is not None and found.is_known else None

    def _ask(self) -> Any:
        return cast(Any, self.tracer).ask(self)


class _ShapedAttribute(fx.proxy.Attribute, Shaped):
    """An attribute of a tensor in a trace, or a method that is to be called."""

"""What a forward computes from several nodes outside of layers, which chunks cannot: refused.

A chunk has the embeddings of its own nodes alone; layers get embeddings of other chunks. So rows of
nodes must not be read or summed by edges, multiplied by a sparse matrix, or reduced, before the
last layer. Behind it they may: that part, the head, runs on all rows.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn import attention

from lightning_gnnpipe.calls import Kind
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.passing import turn_edges
from lightning_gnnpipe.stages.find import LAYER
from lightning_gnnpipe.stages.shapes import ANSWER, is_of_shapes, line_of_node
from lightning_gnnpipe.stages.values import SIZES, TURNED, Value
from lightning_gnnpipe.user_code import at

_BY_HAND = (
    "Forward passes messages by hand, '{}' on the numbers of nodes in edges{}.\n"
    "In chunks only layers see the embeddings of other chunks' nodes.\n"
    "Write a layer of your own, as below, and pass degrees and the like as arguments of forward:\n"
    + LAYER
)
_RESULT = (
    "Forward computes '{}' of the edges{}.\n"
    "A chunk has the edges that end in its nodes.\n"
    "Compute it in training_step, and pass the result to forward as an argument."
)
_PRODUCT = (
    "Forward applies '{}' to a sparse matrix{}.\n"
    "In chunks only layers see the embeddings of other chunks' nodes.\n"
    'Instead of adj_t @ x write self.sum = SimpleConv(aggr="sum") in __init__, and '
    "self.sum(x, adj_t) in forward; pass what is made of the matrix alone as an argument."
)
_SUM = (
    "Forward combines all nodes between layers, by '{}'{}.\n"
    "A chunk holds some of the nodes.\n"
    "Pool behind the last message-passing layer, where pools and decoders may stand, or in "
    "training_step; use a norm of torch_geometric.nn (GraphNorm, PairNorm), or num_chunks=1."
)
_SOME = (
    "Forward takes some rows of nodes, or shuffles them, between layers{1}.\n"
    "A chunk holds some of the nodes.\n"
    "Write h = torch.where(mask.unsqueeze(-1), new, h), with a mask of all nodes; take rows behind "
    "the last message-passing layer, and shuffle them in training_step."
)
_INDICES = (
    "Forward computes '{}' with indices of nodes, or with positions of edges{}.\n"
    "A chunk has indices of its own, and edges are sorted by target.\n"
    "Make a mask of nodes or edges in training_step, and pass it to forward as an argument."
)
_TURNED = (
    "Layer '{}' reads edges against their direction, with features of edges{}.\n"
    "A chunk has the features of edges that end in its nodes.\n"
    "Pass edge_index.flip(0) and the features as arguments of forward, an edge set of their own, "
    "to a layer without flow=."
)
_TURNED_BY_HAND = (
    "Layer '{}' reads edges that '{}' has turned{}.\n"
    "In chunks an edge belongs to the node in which it ends.\n"
    "Write edge_index.flip(0), of the argument itself, for the same edges turned."
)
# Functions along a dimension that keep rows or sizes: the place of that dimension among arguments,
# and the dimension without it; None for all.
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip"), (1, None)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("max", "min", "median", "mode", "unique"), (1, None)),
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), (1, 1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    **{"normalize": (2, 1), "roll": (2, None)},
}
# Attention over all nodes.
_ATTENTION = (
    attention.PerformerAttention,
    attention.PolynormerAttention,
    attention.SGFormerAttention,
)
_OF_SEQUENCES = (
    *(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder),
    *(nn.TransformerDecoderLayer, nn.TransformerDecoder, nn.RNNBase),
)
# Functions of indices and a constant, or another tensor.
_OF_INDICES = {"lt", "le", "gt", "ge", "eq", "ne", "isin", "clamp", "clamp_min", "clamp_max"}
_OF_INDICES |= {"add", "sub", "mul", "mod", "remainder", "fmod", "floordiv", "floor_divide"}
_OF_INDICES |= {"iadd", "isub", "imul", "truediv", "div", "bucketize", "searchsorted", "and"}
_OF_INDICES |= {"rshift", "lshift", "minimum", "maximum", "pow"}
_COMPARED = {"lt", "le", "gt", "ge", "eq", "ne"}
_CASTS = {"float", "double", "half", "to", "type", "type_as", "long", "int"}
_NEW = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
# Functions that take a part along a dimension: the place of that dimension among arguments.
_TAKE_ALONG = {"split": 2, "split_with_sizes": 2, "tensor_split": 2, "narrow": 1}
# Functions of edges that need the edges of all nodes.
_OF_EDGES = ("gcn_norm", "get_laplacian", "to_undirected", "to_torch_csr_tensor", "to_edge_index")


def find_structure(
    nodes: Iterable[fx.Node], values: Mapping[str, Value], edges: Collection[str]
) -> set[fx.Node]:
    """Return the nodes that hold numbers of nodes: the leaves `edges`, parts of them, matrices."""
    found: set[fx.Node] = set()
    for node in nodes:
        if _name_of(node) in _NEW or _is_beside_edges(node):
            continue
        value = values.get(node.name)
        is_integer = value is None or value.dtype in (torch.int64, torch.int32)
        is_integer |= _name_of(node) in _CASTS
        is_made = not is_of_shapes(node) and not found.isdisjoint(node.all_input_nodes)
        if node.name in edges or (is_made and is_integer):
            found.add(node)
    return found


def refuse_mixing(
    nodes: Iterable[fx.Node],
    values: Mapping[str, Value],
    root: nn.Module,
    structure: Collection[fx.Node] | None,
) -> None:
    """Raise `UnsupportedError` for the first of `nodes`, no layers, that mixes rows of nodes.

    `structure`: see `find_structure`; None if the graph is one chunk, which has all rows.
    """
    for node in nodes:
        words = _PRODUCT if not is_of_shapes(node) and multiplies(node, values) else None
        if words is None and structure is not None and not is_of_shapes(node):
            by_hand = _RESULT if _name_of(node) in _OF_EDGES else _BY_HAND
            words = by_hand if _reads_by_edges(node, values, structure) else None
            mixes = attends(node, values, root) or orders(node, values) or _reduces(node, values)
            names_rows = _name_of(node) in ("getitem", "index_select")
            words = (_SOME if names_rows else _SUM) if words is None and mixes else words
        if words is not None:
            raise UnsupportedError(words.format(_name_of(node), at(line_of_node(node))))


def refuse_indices(
    nodes: Iterable[fx.Node],
    values: Mapping[str, Value],
    structure: Collection[fx.Node] | None,
    edge_counts: Collection[int],
    drawn: Collection[fx.Node],
) -> None:
    """Raise `UnsupportedError` for the first of `nodes` that depends on how rows are numbered.

    A small sample does not show it: there, each edge comes before position 300, for instance.
    `structure`: see `refuse_mixing`. `edge_counts`: numbers of edges in the sample. `drawn`: what
    depends on random numbers.
    """
    for node in nodes:
        is_position = _takes_positions(node, values, edge_counts)
        if is_position or _reads_indices(node, structure, edge_counts, drawn):
            raise UnsupportedError(_INDICES.format(_name_of(node), at(line_of_node(node))))


def turn_leaves(graph: fx.Graph, edges: Collection[str]) -> None:
    """Replace `edge_index.flip(0)` of the leaves `edges` by a function that turns chunks' edges."""
    for node in graph.nodes:
        leaf, *dims = (*node.args, *node.kwargs.values()) or (None,)
        is_turn = _name_of(node) == "flip" and dims in ([0], [[0]], [(0,)])
        if is_turn and isinstance(leaf, fx.Node) and leaf.name in edges:
            node.op, node.target, node.args, node.kwargs = "call_function", turn_edges, (leaf,), {}


def refuse_turned(calls: Iterable[fx.Node], values: Mapping[str, Value], root: nn.Module) -> None:
    """Raise `UnsupportedError` for a layer that reads turned edges and features of edges."""
    for node in calls:
        sources = node.all_input_nodes
        layers = root.get_submodule(str(node.target)).modules()
        is_upstream = any(getattr(m, "flow", "") == "target_to_source" for m in layers)
        if is_upstream or any(one.target is turn_edges for one in sources):
            of_edges = (values[one.name].kind is Kind.EDGE for one in sources if one.name in values)
            if any(of_edges):
                raise UnsupportedError(_TURNED.format(_name_of(node), at(line_of_node(node))))
        for one in sources:
            if TURNED in one.meta and _name_of(one) in ("getitem", "index_select", "stack", "cat"):
                names = _name_of(node), _name_of(one)
                raise UnsupportedError(_TURNED_BY_HAND.format(*names, at(line_of_node(one))))


def multiplies(node: fx.Node, values: Mapping[str, Value]) -> bool:
    """Whether `node` reads a sparse matrix."""
    of_matrix = (values.get(one.name) for one in node.all_input_nodes)
    return any(one is not None and one.kind is Kind.EDGE_INDEX for one in of_matrix)


def attends(node: fx.Node, values: Mapping[str, Value], root: nn.Module) -> bool:
    """Whether `node` calls attention over all nodes; targets are looked up in `root`.

    Also torch's modules for sequences, if the nodes are the places of one sequence.
    """
    if node.op != "call_module":
        return False
    layer = root.get_submodule(str(node.target))
    if any(isinstance(m, _ATTENTION) for m in layer.modules()):
        return True
    given = [values[one.name] for one in node.all_input_nodes if one.name in values]
    if not isinstance(layer, _OF_SEQUENCES) or not given or given[0].row_kind is None:
        return False
    batch_first = next(m.batch_first for m in layer.modules() if hasattr(m, "batch_first"))
    is_batch = len(given[0].row_shape) == 2  # [batch, places, channels], in either order
    return (given[0].nodes_in or 0) == (1 if is_batch and batch_first else 0)


def orders(node: fx.Node, values: Mapping[str, Value]) -> bool:
    """Whether `node` reads several rows for each that it makes, by its name and dimension."""
    source = node.args[0] if node.args else None
    value = values.get(source.name) if isinstance(source, fx.Node) else None
    if node.target is operator.getitem:
        return value is not None and value.kind is Kind.NODE and _names_rows(node.args[1], values)
    place, dim = _ALONG.get(_name_of(node), (0, None))
    if place == 0 or value is None or value.row_kind is None or node.op == "call_module":
        return False
    given: Any = node.args[place] if len(node.args) > place else dim
    given = node.kwargs.get("dim", node.kwargs.get("dims", given))
    if isinstance(given, fx.Node):  # max(h, other)
        return False
    num_dims, rows = len(value.row_shape) + 1, value.nodes_in or 0
    dims = given if isinstance(given, list | tuple) else [given]
    return any(one is None or one % num_dims == rows for one in dims)


def _names_rows(key: Any, values: Mapping[str, Value]) -> bool:
    """Whether an index holds numbers of rows, as in h[:1024] and h[torch.randperm(h.size(0))]."""
    first = key[0] if isinstance(key, tuple) and key else key
    if isinstance(first, fx.Node):  # else its size shows
        return is_of_shapes(first) and first.name in values
    return type((first.stop or first.start) if isinstance(first, slice) else first) is int


def _is_beside_edges(node: fx.Node) -> bool:
    """Whether `node` is what a function of PyG returns beside edges, such as their types."""
    if node.target is not operator.getitem or node.args[1] == 0:
        return False
    made = getattr(node.args[0], "target", None)
    return str(getattr(made, "__module__", "")).startswith("torch_geometric.")


def _takes_positions(
    node: fx.Node, values: Mapping[str, Value], edge_counts: Collection[int]
) -> bool:
    """Whether `node` takes edges by constant positions, as in edge_index[:, :300]."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    sizes: Sequence[int] = source.meta.get(SIZES, ())
    of_edges = {place for place, size in enumerate(sizes) if size in edge_counts}
    value = values.get(source.name)
    if value is not None and value.row_kind is not None:  # other dimensions are channels
        of_edges &= {0} if value.kind is Kind.EDGE else set()
    if node.target is operator.getitem:
        return not of_edges.isdisjoint(_constant_dims(node.args[1], len(sizes)))
    place = _TAKE_ALONG.get(_name_of(node))
    if place is None or not sizes:
        return False
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else 0)
    return type(dim) is int and dim % len(sizes) in of_edges


def _constant_dims(key: Any, num_dims: int) -> Iterator[int]:
    """Yield the dimensions that an index takes constant positions of."""
    keys = key if isinstance(key, tuple) else (key,)
    dim, num_keys = 0, sum(one is not None and one is not ... for one in keys)
    for one in keys:
        parts = (one.start, one.stop, one.step) if isinstance(one, slice) else (one,)
        if any(type(part) is int for part in parts):
            yield dim
        dim += num_dims - num_keys if one is ... else one is not None


def _reads_indices(
    node: fx.Node,
    structure: Collection[fx.Node] | None,
    edge_counts: Collection[int],
    drawn: Collection[fx.Node],
) -> bool:
    """Whether `node` computes with indices of nodes, or `arange` of rows, and something else."""
    name = _name_of(node).strip("_")
    if name not in _OF_INDICES:
        return False

    def is_index(one: Any) -> bool:
        if not isinstance(one, fx.Node):
            return False
        if structure is not None and one in structure:
            return True
        answer = one.meta[ANSWER] if is_of_shapes(one) and one not in drawn else None
        if answer is None or not answer.is_of_rows or not isinstance(answer.value, Tensor):
            return False
        flat = answer.value.flatten()  # arange, perhaps of another shape
        is_of_edges = not {*edge_counts}.isdisjoint(answer.value.shape)
        return bool((flat != flat[:1]).any()) and (structure is not None or is_of_edges)

    given = [one for one in (*node.args, *node.kwargs.values()) if one is not None]
    constants = [one for one in given if type(one) is int]
    is_sign = name in _COMPARED and len(constants) == 1 and len(given) == 2
    if is_sign and (constants[0] == -1 or (constants[0] == 0 and name in ("ge", "lt"))):
        return False  # padding, as in edge_index[1] != -1
    indices = list(map(is_index, given))
    return any(indices) and not all(indices)


def _reads_by_edges(
    node: fx.Node, values: Mapping[str, Value], structure: Collection[fx.Node]
) -> bool:
    """Whether `node` reads or makes rows of nodes by their numbers in edges."""
    sources = node.all_input_nodes
    if _is_ours(node) or not any(one in structure for one in sources):
        return False
    has_rows = any(one not in structure and _counts_nodes(one, values) for one in sources)
    return has_rows or _counts_nodes(node, values) or _name_of(node) in _OF_EDGES


def _is_ours(node: fx.Node) -> bool:
    """Whether `node` calls a function that this package has put into the graph."""
    package = __name__.partition(".")[0]
    return str(getattr(node.target, "__module__", "")).startswith(f"{package}.")


def _counts_nodes(node: fx.Node, values: Mapping[str, Value]) -> bool:
    return node.name in values and values[node.name].row_kind == (Kind.NODE, 0)


def _reduces(node: fx.Node, values: Mapping[str, Value]) -> bool:
    """Whether `node` makes rows of nodes into something smaller, or into pairs of nodes."""
    rows = [one for one in node.all_input_nodes if _counts_nodes(one, values)]
    if not rows or SIZES not in node.meta or _name_of(node).startswith("new_"):
        return False
    count = rows[0].meta[SIZES][values[rows[0].name].nodes_in or 0]
    sizes = node.meta[SIZES]
    return sizes.count(count) > 1 or (count not in sizes and torch.Size(sizes).numel() % count != 0)


def _name_of(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target).removeprefix("module.")
    return str(getattr(node.target, "__name__", node.target))

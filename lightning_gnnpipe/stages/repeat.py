"""Finds values that a stage recomputes instead of receiving, like X_0 = relu(lin(dropout(x))).

Every rank holds the batch, so values computed from it row by row need not be sent. The stages share
the weights (`lin`) and sum their gradients, instead of sending gradients of rows back. A copy keeps
the number of its segment, which seeds random numbers, so dropout masks are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch import fx, nn

from lightning_gnnpipe.calls import Kind
from lightning_gnnpipe.stages.find import contains_passing
from lightning_gnnpipe.stages.layers import Layers
from lightning_gnnpipe.stages.segments import Segment, find_sources, part_of, without
from lightning_gnnpipe.stages.trace import is_named_random
from lightning_gnnpipe.stages.values import SampleRun
from lightning_gnnpipe.types import RepeatOption

# Weights that may be used to spare one byte of a row. A weight takes two operations per row forward
# and four backward, and a value of B bytes per row spares 2 B bytes: 128 weights per byte are 384
# operations for each byte that is not sent. A CPU core makes as many while a link of 1 Gbit/s sends
# a byte, a GPU while one of 100 Gbit/s does.
_MOST_WEIGHTS_PER_BYTE = 128


def find_repeatable(layers: Layers, run: SampleRun, served: Collection[nn.Module]) -> Layers:
    """Return `layers` with `repeatable` set; segments no longer pass these values on.

    A repeatable value crosses a cut. One segment computes it from leaves, through tensors with the
    same rows, without message passing, modules in `served`, or changes of buffers. No other node
    overwrites its sources or draws random numbers before it. `run`: of the traced graph.
    """
    special = {id(m) for m in served}
    repeatable = {
        name: segment.index
        for segment in layers.segments[:-1]
        for name, end in segment.ends.items()
        if end.op != "placeholder"
        and _is_of_rows(name, segment, layers, special)
        and _is_undisturbed(segment, {node.name for node in find_sources([end])}, run)
    }
    # Nothing overwrites these values, so that segments need not pass them on.
    segments = tuple(
        without(s, {name for name, source in repeatable.items() if source < s.index})
        for s in layers.segments
    )
    return replace(layers, segments=segments, repeatable=repeatable)


def _is_of_rows(name: str, segment: Segment, layers: Layers, special: Collection[int]) -> bool:
    """Whether a value is computed from leaves, by nodes that only see rows of its own kind."""
    value, sources = layers.values[name], find_sources([segment.ends[name]])
    has_rows: set[fx.Node] = set()
    for node in segment.module.graph.nodes:
        if node not in sources:
            continue
        known = layers.values.get(node.name)
        if node.op == "placeholder" and not node.name.startswith("leaf_"):
            return False
        is_table = node.name in layers.weights  # may be larger than the rows that are spared
        if is_table or not _is_plain(segment, node, special):
            return False
        if known is not None and known.kind in (Kind.NODE, Kind.EDGE):
            if (known.kind, known.edge_set) != (value.kind, value.edge_set):
                return False
            has_rows.add(node)
        elif any(source in has_rows for source in node.all_input_nodes):
            if known is not None:  # reduces over rows
                return False
            has_rows.add(node)
    return True


def _is_plain(segment: Segment, node: fx.Node, special: Collection[int]) -> bool:
    """Whether `node` is no special module and its gradients are dense, so stages can sum them."""
    if node.op != "call_module":
        return node.kwargs.get("sparse") is not True
    layer = segment.module.get_submodule(str(node.target))
    return not contains_passing(layer) and not any(
        id(m) in special or getattr(m, "sparse", False) is True for m in layer.modules()
    )


def _is_undisturbed(segment: Segment, sources: set[str], run: SampleRun) -> bool:
    """Whether the nodes `sources` of `segment` compute the same without its other nodes."""
    is_own = all(run.writers[name] <= sources for name in sources)
    nodes = segment.module.graph.nodes
    drawing = [
        node.name in sources
        for node in nodes
        if node.name in run.draws or is_named_random(node, segment.module)
    ]
    is_first = drawing == sorted(drawing, reverse=True)  # none draws behind another node
    return is_own and run.changers.isdisjoint(sources) and is_first


def choose_repeated(
    layers: Layers, option: RepeatOption, num_rows: Callable[[Kind, int], int], num_shards: int
) -> tuple[str, ...]:
    """Return the names of the values that stages recompute; `option`: all, none, or "auto".

    "auto" picks a value if its rows and their gradients are more bytes at each cut than the
    gradients of its weights, summed over `num_shards` forth and back, and if it uses at most 128
    weights per byte of a row. A weight counts for the first value that uses it. `num_rows` maps a
    kind and an edge set to a number of rows.
    """
    if not option:
        return ()
    chosen, held = [], set[int]()
    for name, source in layers.repeatable.items():
        part = part_of(layers.segments[source], (name,))
        value = layers.values[name]
        new = [p for p in part.module.parameters() if id(p) not in held]
        rows = num_rows(value.kind, value.edge_set)
        spared = rows * value.row_bytes * (2 if value.requires_grad else 1)
        summed = 2 * num_shards * tied_bytes(new)
        is_cheap = sum(p.numel() for p in new) <= _MOST_WEIGHTS_PER_BYTE * value.row_bytes
        if option is True or (spared > summed and is_cheap):
            chosen.append(name)
            held.update(map(id, new))
    return tuple(chosen)


def tied_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of the gradients of `parameters`."""
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)

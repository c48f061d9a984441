"""Assigns consecutive layers to stages, and finds which stages use which parameters.

Stages send zeros where a value has no gradient. Optimizers treat a zero gradient differently from
none (momentum, weight decay), so `find_reached` finds the weights that have a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from torch import fx, nn

from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.stages.layers import Layers
from lightning_gnnpipe.stages.segments import Segment, leaves_of, part_of
from lightning_gnnpipe.stages.trace import strip_root
from lightning_gnnpipe.stages.values import Value


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that run on one rank."""

    index: int
    segments: tuple[Segment, ...]
    repeated: tuple[Segment, ...]  # parts of earlier layers, recomputed from the batch
    received: tuple[str, ...]  # values from the previous stage
    sent: tuple[str, ...]  # values for the next stage; on the last one, the model's outputs
    values: dict[str, Value]
    weights: Mapping[str, str] = field(default_factory=dict)  # names of parameters, by their leaf

    @cached_property
    def computed(self) -> tuple[Segment, ...]:
        """All segments that the stage runs: parts of earlier layers, then its own layers."""
        return *self.repeated, *self.segments

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Names of the leaves that this stage reads."""
        return leaves_of(self.computed)


def solve_balance(
    costs: Sequence[float], num_stages: int, first_costs: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the layers per stage that minimize the largest cost of a stage.

    Dynamic programming. Ties give the earlier stages fewer layers. `costs`: per layer, any unit, at
    least 0. `first_costs`: extra cost of a stage that begins with the layer.
    """
    num_layers = len(costs)
    check_num_stages(num_layers, num_stages)
    total = [0.0, *accumulate(costs)]
    extra = [0.0] * num_layers if first_costs is None else first_costs
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by number of layers
    for stage in range(1, num_stages + 1):
        longer = {}
        for end in range(stage, num_layers + 1):
            slowest, start = min(  # of equal ones the first start
                (max(best[start][0], total[end] - total[start] + extra[start]), start)
                for start in best
                if start < end
            )
            longer[end] = slowest, (*best[start][1], end - start)
        best = longer
    return best[num_layers][1]


def check_counts(counts: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return `counts` as a tuple; raise `ConfigError` if they do not fit layers and stages."""
    check_num_stages(num_layers, num_stages)
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_layers:
        raise ConfigError(
            expected=f"'balance' to have one number of layers for each stage ({num_stages}), "
            f"each at least 1 and {num_layers} together",
            found=f"{list(counts)}",
            remedy="Correct the numbers, or write balance='measured'.",
        )
    return tuple(counts)


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Raise `ConfigError` if there are more stages than layers."""
    if num_stages <= num_layers:
        return
    devices = f"{num_layers} device{'s' if num_layers > 1 else ''}"
    remedy = f"Train on at most {devices}, or use a deeper model."
    if num_layers == 1:
        remedy += (
            " If forward computes edges (dropout_edge, knn_graph), compute them in "
            "training_step: layers on them are not cut apart."
        )
    raise ConfigError(
        expected="at least one layer for each stage",
        found=f"{num_stages} stages and {num_layers} layers that can be cut apart",
        remedy=remedy,
    )


def split_layers(
    layers: Layers, counts: Sequence[int], repeated: Collection[str] = ()
) -> tuple[Stage, ...]:
    """Return one stage per count; stages recompute the values `repeated`."""
    stages = []
    for index, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        is_last = end == len(layers.segments)
        segments, crossing = layers.segments[start:end], layers.crossing[start]
        read = {name for segment in segments for name in segment.inputs}
        read |= set(layers.outputs) if is_last else set()
        again = [name for name in crossing if name in repeated and name in read]
        sources = sorted({layers.repeatable[name] for name in again})
        parts = tuple(
            part_of(layers.segments[i], [n for n in again if layers.repeatable[n] == i])
            for i in sources
        )
        received = tuple(name for name in crossing if name not in repeated)
        following = () if is_last else layers.crossing[end]
        sent = layers.outputs if is_last else tuple(n for n in following if n not in repeated)
        part = Stage(index, segments, parts, received, sent, layers.values, layers.weights)
        stages.append(part)
    return tuple(stages)


def repeat_costs(
    layers: Layers, repeated: Collection[str], costs: Mapping[str, float]
) -> list[float]:
    """Return, for each layer, the largest recompute cost of a stage that begins with it."""
    return [sum(costs[name] for name in names if name in repeated) for names in layers.crossing]


def find_users(stages: Iterable[Stage], module: nn.Module) -> dict[str, set[int]]:
    """Return the stages that use each parameter and buffer of `module`, by its first name."""
    users: dict[str, set[int]] = {}
    by_name = first_names(module)
    for stage in stages:
        for name in _names_used(stage.computed, module, by_name, stage.weights):
            users.setdefault(name, set()).add(stage.index)
    return users


def names_of_head(layers: Layers, module: nn.Module) -> set[str]:
    """Return the first names of the parameters and buffers that the head uses."""
    head = [layers.head] if layers.head else []
    return set(_names_used(head, module, first_names(module), layers.weights))


def ids_in_stages(
    module: nn.Module, root: nn.Module, users: Collection[str], layers: Iterable[Layers]
) -> set[int]:
    """Return ids of the parameters among `users` that no head or other module of `root` uses."""
    inside, named = set(module.modules()), dict(module.named_parameters())
    outer = (one for one in root.modules() if one not in inside)
    shared = {id(p) for one in outer for p in one.parameters(recurse=False)}
    of_head = set[str]().union(*(names_of_head(one, module) for one in layers))
    return {id(named[name]) for name in set(users) - of_head if name in named} - shared


def _names_used(
    segments: Iterable[Segment],
    module: nn.Module,
    by_name: Mapping[str, str],
    weights: Mapping[str, str],
) -> Iterator[str]:
    """Yield the first names of all that `segments` use; `weights`: see `Stage`."""
    for segment in segments:
        for node in segment.module.graph.nodes:
            yield from _names_of(node, module, by_name, weights)


def _names_of(
    node: fx.Node, module: nn.Module, by_name: Mapping[str, str], weights: Mapping[str, str]
) -> Iterator[str]:
    """Yield the first names of the parameters and buffers of `module` that `node` uses."""
    name = strip_root(str(node.target))
    if node.op == "get_attr" and name in by_name:
        yield by_name[name]
    elif node.op == "placeholder" and name in weights:
        yield weights[name]
    elif node.op == "call_module":
        layer, prefix = module.get_submodule(name), f"{name}." if name else ""
        for tensors in (layer.named_parameters, layer.named_buffers):
            yield from (by_name[prefix + inner] for inner, _ in tensors(remove_duplicate=False))


def first_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer of `module` to the first name of that tensor."""
    first_name: dict[int, str] = {}
    tensors = (module.named_parameters, module.named_buffers)
    named = (pair for one in tensors for pair in one(remove_duplicate=False))
    return {name: first_name.setdefault(id(tensor), name) for name, tensor in named}


def find_reached(layers: Layers, module: nn.Module, outputs: Collection[str]) -> set[str]:
    """Return the names of the leaves and parameters that `outputs` send gradients to."""
    by_name = first_names(module)
    reached = set(outputs) | names_of_head(layers, module)
    for segment in reversed(layers.segments):
        wanted = {node for name, node in segment.ends.items() if name in reached}
        for node in reversed(segment.module.graph.nodes):
            is_leaf = node.op == "placeholder"
            value = layers.values.get(str(node.target) if is_leaf else node.name)
            if node not in wanted or (value is not None and not value.requires_grad):
                continue
            wanted.update(node.all_input_nodes)
            if is_leaf:
                reached.add(str(node.target))
            reached.update(_names_of(node, module, by_name, {}))
    return reached | {name for leaf, name in layers.weights.items() if leaf in reached}

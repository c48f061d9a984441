"""Assigns layers to stages, and finds which stages use which parameters.

Stages send zeros where a value has no gradient. Optimizers treat a zero gradient differently from
none (momentum, weight decay), so `find_reached` finds the weights that have a gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from lightning_gnnpipe.stages.layers import Layers
from lightning_gnnpipe.stages.segments import Segment, part_of
from lightning_gnnpipe.stages.trace import strip_root
from lightning_gnnpipe.stages.values import Value


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers that run on one rank.

    Attributes:
        repeated: Parts of earlier layers that the stage recomputes from the batch.
        received: Names of the values from the previous stage.
        sent: Names of the values for the next stage; on the last stage, of the model's outputs.
    """

    index: int
    segments: tuple[Segment, ...]
    repeated: tuple[Segment, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    values: dict[str, Value]

    @property
    def computed(self) -> tuple[Segment, ...]:
        """All segments that the stage runs: parts of earlier layers, then its own layers."""
        return *self.repeated, *self.segments

    @property
    def leaves(self) -> frozenset[str]:
        """Names of the leaves that this stage reads."""
        named = {name for segment in self.computed for name in segment.inputs}
        return frozenset(name for name in named if name.startswith("leaf_"))


def split_layers(
    layers: Layers, counts: Sequence[int], repeated: Collection[str] = ()
) -> tuple[Stage, ...]:
    """Return one stage per count; stages recompute the values `repeated`."""
    stages = []
    start = 0
    for index, count in enumerate(counts):
        end = start + count
        is_last = end == len(layers.segments)
        segments = layers.segments[start:end]
        crossing = layers.crossing[start]
        read = {name for segment in segments for name in segment.inputs}
        read |= set(layers.outputs) if is_last else set()
        again = [name for name in crossing if name in repeated and name in read]
        sent = layers.outputs if is_last else _without(layers.crossing[end], repeated)
        stages.append(
            Stage(
                index,
                segments,
                _parts(layers, again),
                _without(crossing, repeated),
                sent,
                layers.values,
            )
        )
        start = end
    return tuple(stages)


def _without(names: Sequence[str], others: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def _parts(layers: Layers, names: Sequence[str]) -> tuple[Segment, ...]:
    """Return the parts of earlier segments that compute the values `names`."""
    sources = sorted({layers.repeatable[name] for name in names})
    return tuple(
        part_of(layers.segments[source], [n for n in names if layers.repeatable[n] == source])
        for source in sources
    )


def repeat_costs(
    layers: Layers, repeated: Collection[str], costs: Mapping[str, float]
) -> list[float]:
    """Return, for each layer, the largest recompute cost of a stage that begins with it."""
    return [sum(costs[name] for name in names if name in repeated) for names in layers.crossing]


def find_users(stages: Iterable[Stage], module: nn.Module) -> dict[str, set[int]]:
    """Return the stages that use each parameter and buffer of `module`, by its first name."""
    by_name = first_names(module)
    users: dict[str, set[int]] = {}
    for stage in stages:
        for segment in stage.computed:
            for node in segment.module.graph.nodes:
                for name in names_used(node, module, by_name):
                    users.setdefault(by_name[name], set()).add(stage.index)
    return users


def first_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a parameter or buffer of `module` to the first name of that tensor."""
    first_name: dict[int, str] = {}
    by_name = {}
    for tensors in (module.named_parameters, module.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            by_name[name] = first_name.setdefault(id(tensor), name)
    return by_name


def choose_held(
    layers: Layers,
    counts: Sequence[int],
    repeated: Collection[str],
    module: nn.Module,
    users: Mapping[str, set[int]],
) -> list[str]:
    """Return the values of `repeated` whose weights are on all stages that recompute them.

    `users`: stages that hold each tensor. A weight can be sent later, its optimizer state cannot.
    """
    plain = find_users(split_layers(layers, counts), module)
    nobody: set[int] = set()

    def is_held(name: str) -> bool:
        wanted = find_users(split_layers(layers, counts, [name]), module)
        return all(
            stages <= users.get(weight, nobody) | plain.get(weight, nobody)
            for weight, stages in wanted.items()
        )

    return [name for name in repeated if is_held(name)]


def names_used(node: fx.Node, module: nn.Module, registered: Container[str]) -> Iterable[str]:
    """Yield the names of the parameters and buffers of `module` that `node` uses."""
    name = strip_root(str(node.target))
    if node.op == "get_attr" and name in registered:
        yield name
    elif node.op == "call_module":
        layer = module.get_submodule(name)
        for tensors in (layer.named_parameters, layer.named_buffers):
            yield from (
                f"{name}.{inner}" if name else inner for inner, _ in tensors(remove_duplicate=False)
            )


def find_reached(layers: Layers, module: nn.Module, outputs: Collection[str]) -> set[str]:
    """Return the names of the leaves and parameters that `outputs` send gradients to."""
    by_name = first_names(module)
    reached = set(outputs)
    for segment in reversed(layers.segments):
        wanted = {node for name, node in segment.ends.items() if name in reached}
        for node in reversed(segment.module.graph.nodes):
            if node not in wanted or not _has_gradient(node, layers):
                continue
            wanted.update(node.all_input_nodes)
            if node.op == "placeholder":
                reached.add(str(node.target))
            reached.update(by_name[name] for name in names_used(node, module, by_name))
    return reached


def _has_gradient(node: fx.Node, layers: Layers) -> bool:
    name = str(node.target) if node.op == "placeholder" else node.name
    value = layers.values.get(name)
    return value is None or value.requires_grad

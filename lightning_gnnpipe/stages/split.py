"""Layers dealt out to stages, and which stages use which parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_gnnpipe.stages.layers import Layers, Segment
from lightning_gnnpipe.stages.trace import strip_root
from lightning_gnnpipe.stages.values import Value


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of consecutive layers.

    Attributes:
        index: Its number, from 0.
        segments: Its layers.
        received: Names of the values that come from the previous stage.
        sent: Names of the values that go to the next stage; on the last stage, of the model's
            outputs.
        values: What is known of every value.
    """

    index: int
    segments: tuple[Segment, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    values: dict[str, Value]

    @property
    def leaves(self) -> frozenset[str]:
        """Names of the batch's tensors that this stage reads."""
        named = {name for segment in self.segments for name in segment.inputs}
        return frozenset(name for name in named if name.startswith("leaf_"))


def split_layers(layers: Layers, counts: Sequence[int]) -> tuple[Stage, ...]:
    """Return one stage for each of `counts`, with that many consecutive layers."""
    stages = []
    start = 0
    for index, count in enumerate(counts):
        end = start + count
        is_last = end == len(layers.segments)
        stages.append(
            Stage(
                index,
                layers.segments[start:end],
                layers.crossing[start],
                layers.outputs if is_last else layers.crossing[end],
                layers.values,
            )
        )
        start = end
    return tuple(stages)


def find_users(stages: Iterable[Stage], module: nn.Module) -> dict[str, set[int]]:
    """Return, for each parameter and buffer of `module` that a stage uses, the stages that do.

    A tensor that is registered under several names is listed under the first.
    """
    first_name: dict[int, str] = {}
    by_name = {}
    for tensors in (module.named_parameters, module.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            by_name[name] = first_name.setdefault(id(tensor), name)
    users: dict[str, set[int]] = {}
    for stage in stages:
        for segment in stage.segments:
            for name in _names_used(segment, module, by_name):
                users.setdefault(by_name[name], set()).add(stage.index)
    return users


def _names_used(segment: Segment, module: nn.Module, registered: Container[str]) -> Iterable[str]:
    for node in segment.module.graph.nodes:
        name = strip_root(str(node.target))
        if node.op == "get_attr" and name in registered:
            yield name
        elif node.op == "call_module":
            layer = module.get_submodule(name)
            for tensors in (layer.named_parameters, layer.named_buffers):
                yield from (
                    f"{name}.{inner}" if name else inner
                    for inner, _ in tensors(remove_duplicate=False)
                )

"""What the nodes of segments do beside computing their values, learned by running them once.

They draw random numbers, overwrite tensors, and change the buffers of their modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.stages.segments import Segment
from lightning_gnnpipe.stages.values import Sample

_RANDOM = re.compile("dropout|bernoulli|rand|normal(?!i[sz])|uniform|multinomial")


@dataclass(slots=True)
class Effects:
    """What nodes do, by name.

    Attributes:
        draws: Nodes that draw random numbers, or would if their share were not 0.
        writers: For each watched node those that overwrite what it has computed.
        changers: Watched nodes that change a buffer of their module.
        results: What watched nodes have computed, as it is after all segments.
    """

    draws: set[str] = field(default_factory=set)
    writers: dict[str, set[str]] = field(default_factory=dict)
    changers: set[str] = field(default_factory=set)
    results: dict[str, Tensor] = field(default_factory=dict)


def learn_effects(segments: Sequence[Segment], sample: Sample, watched: Collection[str]) -> Effects:
    """Run `segments` on `sample`, each with its number as the seed; return what its nodes do.

    Args:
        segments: All layers, in order.
        sample: Leaves of a small graph.
        watched: Names of the nodes of which it matters whether they are overwritten.
    """
    effects = Effects(writers={name: set() for name in watched})
    values = {f"leaf_{i}": leaf.clone() for i, leaf in enumerate(sample.leaves)}
    for segment in segments:
        torch.manual_seed(segment.index)
        watcher = _Watcher(segment.module, effects, sample.edge_index.device)
        outputs = watcher.run(*(values[name] for name in segment.inputs))
        values |= dict(zip(segment.outputs, outputs, strict=True))
    return effects


class _Watcher(fx.Interpreter):
    """Runs a segment and compares random numbers, tensors and buffers before and after each node.

    Args:
        module: The segment.
        effects: Is added to.
        device: Where it runs.
    """

    def __init__(self, module: fx.GraphModule, effects: Effects, device: torch.device) -> None:
        super().__init__(module)
        self._effects, self._device = effects, device

    def run_node(self, n: fx.Node) -> Any:
        effects = self._effects
        buffers = self._buffers(n)
        before = [buffer.clone() for buffer in buffers]
        numbers = _random_states(self._device)
        versions = {name: version_of(tensor) for name, tensor in effects.results.items()}
        result = super().run_node(n)
        if numbers != _random_states(self._device) or is_named_random(n, self.module):
            effects.draws.add(n.name)
        for name, version in versions.items():
            if version_of(effects.results[name]) != version:
                effects.writers[name].add(n.name)
        if any(not torch.equal(old, new) for old, new in zip(before, buffers, strict=True)):
            effects.changers.add(n.name)
        if n.name in effects.writers and isinstance(result, Tensor):
            effects.results[n.name] = result
        return result

    def _buffers(self, node: fx.Node) -> list[Tensor]:
        is_watched = node.op == "call_module" and node.name in self._effects.writers
        return list(self.submodules[str(node.target)].buffers()) if is_watched else []


def is_named_random(node: fx.Node, root: nn.Module | None = None) -> bool:
    """Whether `node` is called like what draws random numbers; modules are looked up in `root`."""
    if node.op == "call_module" and root is not None:
        layers = root.get_submodule(str(node.target)).modules()
        return any("drop" in type(layer).__name__.lower() for layer in layers)
    is_function = node.op in ("call_function", "call_method")
    return is_function and _RANDOM.search(str(node.target).lower()) is not None


def _random_states(device: torch.device) -> list[bytes]:
    """Return the states of the generators that layers on `device` draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]

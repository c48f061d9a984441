"""The autograd graphs of a stage's layers over all chunks, each by itself.

    chunk 2   leaves -> layer 0 -> outputs | leaves -> layer 1 -> outputs | ..
    chunk 0   leaves -> layer 0 -> outputs | leaves -> layer 1 -> outputs | ..

Forward goes through them chunk by chunk, as the pipeline does, backward layer by layer: a layer's
rows have the gradient of all chunks that read them before they go back any further.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.engine.chunk_run import SeedOf, run_segments
from lightning_gnnpipe.engine.recompute import run_recomputed
from lightning_gnnpipe.passing import CallKey, Cut, MessageContext
from lightning_gnnpipe.stages import Segment

Grads = dict[str, Tensor]
"""The gradients of a chunk's values, by name."""


@dataclass(slots=True)
class _Graph:
    """One layer over one chunk.

    Attributes:
        leaves: What it was given, by name, as far as it needs a gradient.
        outputs: What it has made, likewise, without what it has only handed on.
        cuts: Where it is cut once more, at rows that other chunks read.
    """

    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor]
    cuts: dict[CallKey, Cut]


class LayerGraphs:
    """The graphs of a pass.

    Args:
        context: Serves message passing.
        recompute: Whether layers are computed again in backward.
    """

    def __init__(self, context: MessageContext, *, recompute: bool) -> None:
        self._context, self._recompute = context, recompute
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def run(
        self,
        segments: Sequence[Segment],
        values: dict[str, Any],
        chunk: Any,
        seed_of: SeedOf | None,
        keep: Collection[str],
    ) -> None:
        """Do what `run_segments` does, layer by layer."""
        run = run_recomputed if self._recompute else run_segments
        for index, segment in enumerate(segments):
            leaves = {n: _cut_off(values[n]) for n in segment.inputs if _needs_grad(values[n])}
            local = {name: leaves.get(name, values[name]) for name in segment.inputs}
            cuts: dict[CallKey, Cut] = {}
            with self._context.cuts.into(cuts):
                run([segment], local, chunk, self._context, seed_of, segment.outputs)
            made = {name: local[name] for name in segment.outputs}
            inner = {name: value for name, value in made.items() if _needs_grad(value)}
            # What is only handed on keeps its gradient, without a copy.
            outputs = {n: value for n, value in inner.items() if value is not leaves.get(n)}
            self._graphs[segment.index, chunk.index] = _Graph(leaves, outputs, cuts)
            values.update(made)
            later = {name for one in segments[index + 1 :] for name in one.inputs}
            for name in values.keys() - later - set(keep):
                del values[name]

    def backward(
        self, segments: Iterable[Segment], chunks: Sequence[int], grads: dict[int, Grads]
    ) -> None:
        """Go back through `segments`, the last first; parameters get their gradients.

        Args:
            segments: Layers of which the next is given, or has given, `grads`.
            chunks: The chunks.
            grads: By chunk, of what the last of them hands on; then of what the first was given.
        """
        for segment in segments:
            graphs = {chunk: self._graphs.pop((segment.index, chunk)) for chunk in chunks}
            _go_back(
                (tensor, grads[chunk].pop(name, None))
                for chunk, graph in graphs.items()
                for name, tensor in graph.outputs.items()
            )
            _gather(graphs, grads)
            for key in reversed(next(iter(graphs.values())).cuts):
                cuts = [graph.cuts[key] for graph in graphs.values()]
                for cut in cuts:
                    cut.end()
                _go_back((cut.rows, cut.gradient()) for cut in cuts)
                _gather(graphs, grads)


def _gather(graphs: dict[int, _Graph], grads: dict[int, Grads]) -> None:
    """Add to `grads` what has come to leaves, and take it from them.

    Autograd may give two leaves views of the same memory: nothing may be added there in place, by
    it or by us.
    """
    for chunk, graph in graphs.items():
        for name, leaf in graph.leaves.items():
            if leaf.grad is not None:
                known = grads[chunk].get(name)
                grads[chunk][name] = leaf.grad if known is None else known + leaf.grad
                leaf.grad = None
        for cut in graph.cuts.values():
            cut.gather()


def _go_back(roots: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Go back from those that have a gradient; what leads to them may be gone through again."""
    known = [(tensor, grad) for tensor, grad in roots if grad is not None]
    if known:
        tensors, grads = zip(*known, strict=True)
        torch.autograd.backward(tensors, grads, retain_graph=True)


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _cut_off(value: Tensor) -> Tensor:
    return value.detach().requires_grad_()

"""Trying the model out before training: is it right on chunks?

The traced layers run on a small sample of the user's graph, whole and then in chunks whose halos
were just filled, with dropout switched off: both must equal the plain module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_gnnpipe.engine.chunk_run import run_segments
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.graph import ChunkPlan, plan_from_assignment
from lightning_gnnpipe.history import HistoryStore
from lightning_gnnpipe.passing import (
    MessageContext,
    find_convs,
    find_layers,
    intercept,
    without_memory,
)
from lightning_gnnpipe.stages import (
    Call,
    Inputs,
    Kind,
    Layers,
    draw_sample,
    restore_buffers,
    undisturbed,
)

_NUM_CHUNKS = 3
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_ROUGH = 5e-2  # half precision
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout}
_DROPOUTS |= {F.feature_alpha_dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout}


def _no_normal(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
    return torch.zeros(size, **kwargs) if like is None else torch.zeros_like(like)


_RANDOM: dict[Any, Callable[..., Tensor]] = {
    torch.normal: _no_normal,
    torch.rand_like: torch.zeros_like,
    torch.randn_like: torch.zeros_like,
    torch.rand: torch.zeros,
    torch.randn: torch.zeros,
    torch.bernoulli: lambda p, **_: (p > 0.5).to(p.dtype),
    Tensor.bernoulli_: lambda x, *_, **__: x.fill_(1),
    Tensor.normal_: lambda x, *_, **__: x.zero_(),
    Tensor.uniform_: lambda x, *_, **__: x.zero_(),
}


class _NoRandomness(TorchFunctionMode):
    """Makes dropout the identity, whatever `training` says, and random numbers constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _RANDOM:
            kwargs.pop("generator", None)
            return _RANDOM[func](*args, **kwargs)
        return func(*args, **kwargs)


def check_layers(
    module: nn.Module, layers: Layers, call: Call, inputs: Inputs, *, on_chunks: bool
) -> None:
    """Refuse a module whose layers do not give what it gives, on a small graph and its chunks.

    Raises:
        UnsupportedError: With the layer where the difference begins, or the error that a layer
            raised.
    """
    sample = draw_sample(module, call, inputs)
    small = Call(sample.leaves, call.names, call.template, None)
    kinds = replace(
        inputs,
        num_nodes=sample.num_nodes,
        edge_index=sample.edge_index,
        edge_sizes=sample.edge_sizes,
    )
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with undisturbed(module), torch.no_grad(), _NoRandomness():
        args, kwargs = small.rebuild(small.leaves)
        with without_memory(find_convs(module)):
            expected = module.forward(*args, **kwargs)
        _check_buffers(module, before)
        assignment = torch.arange(sample.num_nodes) % min(_NUM_CHUNKS, sample.num_nodes)
        plan = plan_from_assignment(sample.edge_index.cpu(), sample.num_nodes, assignment)
        plan = plan.with_edge_sets(sample.edge_sizes).to(sample.edge_index.device)
        checker = _Checker(module, layers, plan, small, kinds)
        reference = checker.run(plan.whole)
        found = layers.rebuild_output([reference[name] for name in layers.outputs])
        _check_structure(found, expected)
        for index, pair in enumerate(zip(_flatten(found), _flatten(expected), strict=True)):
            _compare(f"output {index}", *pair)
        if not on_chunks:
            return
        chunked = checker.run(plan)
        for name in checker.order:
            _compare(name, chunked[name], reference[name])


class _Checker:
    """Runs all layers over a plan, on one rank, and puts every value into node order."""

    def __init__(
        self, module: nn.Module, layers: Layers, plan: ChunkPlan, call: Call, kinds: Inputs
    ) -> None:
        self.layers, self.plan, self.intercepted = layers, plan, find_layers(module)
        self.inputs = PlannedInputs(plan)
        self.inputs.load(call, kinds)
        self.store = HistoryStore(plan.num_nodes, plan.num_chunks)
        self.context = MessageContext(self.store, plan)
        self.context.leaves = self.inputs
        computed = (name for segment in layers.segments for name in segment.outputs)
        is_row = {name for name, value in layers.values.items() if value.kind is Kind.NODE}
        self.order = [name for name in dict.fromkeys(computed) if name in is_row]

    def run(self, plan: ChunkPlan) -> dict[str, Tensor]:
        """Return every node-level value, `[num_nodes, *]`, by name."""
        found: dict[str, Tensor] = {}
        leaves = {
            name for s in self.layers.segments for name in s.inputs if name.startswith("leaf_")
        }
        for chunk in plan.chunks:
            values = self.inputs.slice(chunk, leaves)
            try:
                with intercept(self.intercepted, self.context):
                    run_segments(self.layers.segments, values, chunk, self.context)
            except UnsupportedError:
                raise
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise UnsupportedError(
                    explain(
                        expected="the model to run on a chunk of the graph",
                        found=f"{type(error).__name__}: {error}",
                        remedy=_REMEDY,
                    )
                ) from error
            rows = plan.perm[chunk.start : chunk.end]
            for name in self.order:
                value = values[name]
                whole = found.setdefault(name, value.new_zeros((plan.num_nodes, *value.shape[1:])))
                whole[rows] = value
        return found


_REMEDY = (
    "Something outside of message passing looks at more than one row, or at the neighbours of a "
    "node: normalise and pool outside of the pipelined module, pass degrees in as a node-level "
    "tensor, or train with num_chunks=1."
)


def _compare(name: str, ours: Tensor, theirs: Tensor) -> None:
    is_rough = torch.is_autocast_enabled(theirs.device.type)
    tolerance = _ROUGH if is_rough else _TOLERANCE.get(theirs.dtype, _ROUGH)
    ours, theirs = ours.double(), theirs.double()
    if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise UnsupportedError(
            explain(
                expected="the model to give the same on chunks of a small graph as on the whole",
                found=f"a difference of {float((ours - theirs).abs().max()):.2g} that begins at "
                f"'{name}'",
                remedy=_REMEDY,
            )
        )


def _check_buffers(module: nn.Module, before: dict[str, Tensor]) -> None:
    norms = find_layers(module).norms.values()
    known = {id(buffer) for norm in norms for buffer in norm.buffers()}
    changed = [
        n for n, b in module.named_buffers() if id(b) not in known and not torch.equal(b, before[n])
    ]
    restore_buffers(module, before)
    if changed:
        raise UnsupportedError(
            explain(
                expected="a forward pass to leave the buffers of the pipelined module as they are",
                found=f"{', '.join(changed)} changed",
                remedy="Such a layer (a running statistic, a power iteration) would be updated "
                "once a chunk; replace it, or train with num_chunks=1.",
            )
        )


def _check_structure(ours: Any, theirs: Any) -> None:
    found, expected = _structure(ours), _structure(theirs)
    if found != expected:
        raise UnsupportedError(
            explain(
                expected=f"the layers to give what forward gives: {expected}",
                found=str(found),
                remedy="Let 'pipeline_layers' end with the same outputs.",
            )
        )


def _structure(output: Any) -> Any:
    """Return `output` with tensors by the word."""
    if isinstance(output, Mapping):
        return {key: _structure(item) for key, item in output.items()}
    if isinstance(output, list | tuple):
        return [_structure(item) for item in output]
    return "tensor" if isinstance(output, Tensor) else repr(output)


def _flatten(output: Any) -> list[Tensor]:
    """Return the tensors of a module's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for item in output.values() for tensor in _flatten(item)]
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in _flatten(item)]
    return []

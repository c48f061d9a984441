"""One training pass: forward now, backward when autograd reaches the outputs.

For autograd the pipeline is one function. A step may run several forwards before one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import fills_grad_of
from lightning_gnnpipe.chunks import (
    ExactStep,
    PassSpec,
    PipelineStats,
    RankRecord,
    Step,
    TraceEvent,
    merge_stats,
    own_random_stream,
    peak_memory_bytes,
)
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.layers import intercept
from lightning_gnnpipe.passing import CallKey
from lightning_gnnpipe.staleness import HistoryStore, Staleness, StalenessRecorder
from lightning_gnnpipe.steps.model import Mode, PipelinedModel
from lightning_gnnpipe.steps.step_context import Controls


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Record of a finished training pass on this rank."""

    is_exact: bool
    num_chunks: int
    events: list[TraceEvent]
    bytes_by_kind: dict[str, int]
    staleness: dict[int, Staleness]

    def after(self, earlier: PassRecord) -> PassRecord:
        """Return the record of a step of several passes; the meter has counted all of them."""
        staleness = dict(earlier.staleness)
        for segment, one in self.staleness.items():
            staleness.setdefault(segment, Staleness()).add(one)
        is_exact = self.is_exact and earlier.is_exact
        events = earlier.events + self.events
        return replace(self, is_exact=is_exact, events=events, staleness=staleness)


class LastStep:
    """The record of the last finished training step."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.record: PassRecord | None = None

    def recount(self) -> None:
        """Add traffic after the step's backward."""
        if self.record is not None:
            self.record = replace(self.record, bytes_by_kind=dict(self._transport.meter))

    def stats(self) -> PipelineStats:
        """Return the step's statistics over all ranks; collective."""
        record, transport = self._record(), self._transport
        memory = peak_memory_bytes(transport.world.device)
        own = RankRecord(record.events, record.bytes_by_kind, memory)
        gathered = transport.everyone.all_gather_objects(own)
        mesh = transport.mesh
        return merge_stats(
            gathered, mesh.num_stages, record.num_chunks, record.is_exact, mesh.num_replicas
        )

    def staleness(self) -> dict[int, Staleness]:
        """Return the step's staleness by layer, over all ranks; collective."""
        merged: dict[int, Staleness] = {}
        for one in self._transport.all_gather_objects(self._record().staleness):
            for layer, staleness in one.items():
                merged.setdefault(layer, Staleness()).add(staleness)
        return dict(sorted(merged.items()))

    def _record(self) -> PassRecord:
        if self.record is None:
            raise ConfigError(
                expected="a finished training step that called the pipelined module",
                found="none in this run",
                remedy="Ask after one, while the run goes on.",
            )
        return self.record


class TrainingPass:
    """Forward and backward of one step; an exact pass reads nothing stale and rounds nothing."""

    def __init__(
        self,
        spec: PassSpec,
        store: HistoryStore | None,
        model: PipelinedModel,
        mode: Mode,
        *,
        is_exact: bool,
    ) -> None:
        self._spec, self._store, self._model = spec, store, model
        self._step = (ExactStep if spec.by_layer else Step)(spec)
        self._sums = model.gradient_sums(mode)
        self._is_done, self._dtype = False, torch.get_default_dtype()
        self.is_exact = is_exact

    def forward(self, controls: Controls, number: int, *, is_first: bool = True) -> list[Tensor]:
        """Run the forward phase of pass `number`; `is_first`: no other one awaits its backward."""
        if is_first:
            self._spec.transport.meter.clear()
        store = self._store
        every = None if store is None else store.options.method.snapshot_steps
        reads_snapshot = every is not None or controls.reads_snapshot
        if store is not None:
            store.begin_step(number, None if self.is_exact else self._spec.order)
            store.recorder = StalenessRecorder() if controls.records_staleness else None
            store.before_forward(is_exact=self.is_exact, reads_snapshot=reads_snapshot)
            captured = self._spec.captured
            is_usual = is_first and store.recorder is None
            if captured is not None and captured.begin(
                self._spec, self._tensors(), is_usual=is_usual
            ):
                self._step.captured = captured
        with (
            intercept(self._model.intercepted, self._spec.context),
            own_random_stream(self._spec.transport.world.device),
            self._spec.computing(),
            torch.enable_grad(),
        ):
            outputs = self._step.forward()
        if store is not None:
            is_due = every is not None and (number + 1) % every == 0
            if controls.reads_snapshot:  # a callback overrides the method
                is_due = controls.takes_snapshot
            store.after_forward(takes_snapshot=reads_snapshot and (self.is_exact or is_due))
        return outputs

    def backward(
        self, grads: Sequence[Tensor], readers: Mapping[int, Sequence[int]]
    ) -> list[Tensor | None]:
        """Run the backward phase; return gradients of the tensors that `readers` names."""
        if self._is_done:
            raise UnsupportedError(
                expected="one backward for each pipelined forward",
                found="a second backward",
                remedy="Sum the losses, then call backward once.",
            )
        self._is_done = True
        with ExitStack() as stack:
            if self._spec.recompute:
                self._spec.context.leaves = self._spec.inputs
                stack.enter_context(intercept(self._model.intercepted, self._spec.context))
                stack.enter_context(own_random_stream(self._spec.transport.world.device))
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)  # precision="64-true" sets it for forward only
            self._sums.begin()
            stack.enter_context(self._spec.computing())
            self._step.backward(grads, self._sums.expect_later)
        if self._spec.captured is not None:
            self._spec.captured.end(self._tensors())
        for name, grad in self._spec.inputs.weight_grads().items():
            torch.autograd.backward([self._model.module.get_parameter(name)], [grad])  # runs hooks
        self._sums.finish()
        if self._store is not None:
            self._store.end_step()
        return self._leaf_grads(readers)

    def _tensors(self) -> list[Tensor]:
        module = self._model.module
        return [*module.parameters(), *module.buffers()]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that must be finite; none without histories."""
        if self._store is None:
            return []
        return [p.grad for p in self._model.module.parameters() if p.grad is not None]

    def _leaf_grads(self, readers: Mapping[int, Sequence[int]]) -> list[Tensor | None]:
        """Return gradients of the batch's tensors; `readers`: by number the stages that read it."""
        found: list[Tensor | None] = []
        transport, mesh = self._spec.transport, self._spec.transport.mesh
        for slot, stages in readers.items():
            grad = self._spec.inputs.take_grad(slot)
            if len(stages) > 1:
                transport.all_reduce(grad, "input_grad")
            elif stages:
                if mesh.stage == stages[0]:
                    transport.sum_over_shards(grad, "input_grad")
                transport.pipe.broadcast(grad, mesh.rank_of(stages[0]), "input_grad")
            found.append(grad)
        self._spec.inputs.release()
        return found

    def record(self) -> PassRecord:
        staleness: dict[int, Staleness] = {}
        if self._store is not None and self._store.recorder is not None:
            for key, one in self._store.recorder.by_key.items():
                assert isinstance(key, CallKey)
                staleness.setdefault(key.segment, Staleness()).add(one)
            self._store.recorder = None
        return PassRecord(
            self.is_exact,
            self._spec.plan.num_chunks,
            self._step.events,
            dict(self._spec.transport.meter),
            staleness,
        )


Backward = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
Search = Callable[[], str | None]  # see `find_not_finite`


class _Seam(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        outputs: Sequence[Tensor],
        constant: Sequence[Tensor],
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.run_backward = backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_backward(ctx)
        return (None, None, None, None, *ctx.run_backward(grads))


def join(
    backward: Backward,
    outputs: Sequence[Tensor],
    has_gradient: Sequence[bool],
    leaves: Sequence[Tensor],
) -> list[Tensor]:
    """Return `outputs` with `backward` as their autograd backward.

    `backward` maps gradients of outputs, None if unused, to gradients of `leaves`.
    """
    anchor = torch.zeros((), requires_grad=True)  # so that autograd reaches this node; see below
    constant = [one for one, flows in zip(outputs, has_gradient, strict=True) if not flows]
    return list(cast(Any, _Seam).apply(backward, outputs, constant, anchor, *leaves))


def _check_backward(ctx: Any) -> None:
    """Refuse all but a plain backward(), which accumulates a gradient in the anchor."""
    (anchor, _), *_ = ctx.next_functions
    if not torch.is_grad_enabled() and fills_grad_of(anchor):
        return
    again = torch.is_grad_enabled()
    raise UnsupportedError(
        expected="a plain loss.backward() through the pipelined module",
        found="create_graph=True" if again else "torch.autograd.grad, or backward(inputs=...)",
        remedy="Compute a penalty on gradients from the module's outputs alone, or train without "
        "the strategy."
        if again
        else "Call loss.backward(), then read .grad of weights and of inputs that require it.",
    )


class PassState:
    """Phases of the training passes of a step.

    `begin`, `end_forward`, the user's loss, `begin_backward`, `end_backward`; `abandon` if no
    backward comes, or if a phase has failed.
    """

    def __init__(self) -> None:
        self._is_inside = False  # a phase has begun, and has not ended
        self._awaiting: dict[int, tuple[Sequence[Tensor], Search]] = {}  # their backward
        self._is_finite: Tensor | None = None  # on the device, read on demand

    @property
    def is_lost(self) -> bool:
        """Whether the pass failed midway, or had non-finite outputs or gradients."""
        is_finite = self._is_finite is None or bool(self._is_finite)
        return self._is_inside or not is_finite

    @property
    def num_awaiting(self) -> int:
        """Number of passes between their forward and their backward."""
        return len(self._awaiting)

    @property
    def searches(self) -> list[Search]:
        """What looks for values that are not finite in the passes that await their backward."""
        return [search for _, search in self._awaiting.values()]

    def begin(self) -> None:
        """Start a pass that writes histories."""
        self._is_inside = True
        if not self._awaiting:
            self._is_finite = None

    def end_forward(self, number: int, outputs: Sequence[Tensor], search: Search) -> None:
        """End the forward phase of pass `number` and await the backward of `outputs`."""
        self._is_inside = False
        self._awaiting[number] = outputs, search

    def begin_backward(self, number: int, grads: Sequence[Tensor]) -> None:
        """Start the backward phase of pass `number` with the gradients of the outputs."""
        self._is_inside = True
        self._awaiting.pop(number, None)
        self._note_finite(grads)

    def end_backward(self, grads: Sequence[Tensor]) -> None:
        """End the pass with the gradients of the parameters."""
        self._is_inside = False
        self._note_finite(grads)

    def settle(self) -> None:
        """End a pass without backward, or clear the state after histories were dropped."""
        self._is_inside, self._is_finite = False, None

    def abandon(self) -> None:
        """Stop awaiting backwards; a phase that has not ended stays lost."""
        for outputs, _ in self._awaiting.values():
            self._note_finite(outputs)
        self._awaiting.clear()

    def _note_finite(self, tensors: Sequence[Tensor]) -> None:
        found = [] if self._is_finite is None else [self._is_finite]
        for one in tensors:
            values = one.coalesce().values() if one.is_sparse else one
            found.append(values.detach().isfinite().all())
        self._is_finite = torch.stack(found).all() if found else None

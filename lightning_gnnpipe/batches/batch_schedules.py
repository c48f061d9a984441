"""Schedules of micro-batches, and the training pass of 1F1B and interleaved stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_gnnpipe.batches.early import EarlyGrads
from lightning_gnnpipe.chunks import PassSpec, own_random_stream
from lightning_gnnpipe.controls import Controls
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.layers import intercept
from lightning_gnnpipe.schedule import (
    Schedule,
    add_transfers,
    arrived_sends,
    fill_drain,
    interleaved,
)
from lightning_gnnpipe.steps import PipelinedModel, TrainingPass
from lightning_gnnpipe.types import ScheduleName


class BatchSchedules:
    """Schedules of micro-batches with transfers, cached by size."""

    def __init__(self, name: ScheduleName) -> None:
        self.name = name
        self._made: dict[tuple[int, int, int], Schedule] = {}

    @property
    def alternates(self) -> bool:
        """Whether some micro-batches run backward before all have run forward."""
        return self.name != "fill_drain"

    def get(self, num_ranks: int, num_virtual: int, num_chunks: int) -> Schedule:
        """Return the schedule of `num_chunks` micro-batches, `num_virtual` stages on each rank."""
        key = num_ranks, num_virtual, num_chunks
        if key not in self._made:
            if self.alternates:  # with one stage a rank, interleaved is 1F1B
                built = interleaved(num_ranks, num_virtual, num_chunks)
            else:
                built = fill_drain(num_ranks, range(num_chunks))
            self._made[key] = add_transfers(built)
        return self._made[key]


def check_schedule(name: ScheduleName) -> None:
    """Raise `UnsupportedError` unless `name` is "fill_drain", the only schedule for one graph."""
    if name != "fill_drain":
        raise UnsupportedError(
            explain(
                expected=f"batches of graphs where schedule={name!r}",
                found="one graph, whose chunks go back when all have come out, since they depend "
                "on each other",
                remedy="Use schedule='fill_drain'.",
            )
        )


Gradients = dict[nn.Parameter, Tensor]


class AlternatingPass(TrainingPass):
    """Training pass of alternating forwards and backwards, run in the user's forward call.

    It adds weight gradients to `grad` in the user's backward. Only the output gradients that arrive
    there show whether the early ones were right, and by what factor the loss was scaled.
    """

    def __init__(
        self,
        parts: PassSpec,
        model: PipelinedModel,
        schedule: Schedule,
        early: EarlyGrads,
        *,
        is_exact: bool,
    ) -> None:
        super().__init__(parts, None, model, schedule, is_exact=is_exact)
        self._early = early
        self._grads: Gradients = {}

    def forward(self, controls: Controls, number: int) -> list[Tensor]:
        """Run both phases and return the detached outputs; see `TrainingPass`."""
        parts = self._parts
        self._watch(controls.on_chunk)
        parts.transport.meter.reset()
        with (
            intercept(self._model.intercepted, parts.context),
            own_random_stream(parts.transport.world.device),
            torch.enable_grad(),
            _apart(self._model.module.parameters()) as self._grads,
        ):
            arrived = arrived_sends(self._schedule, self._place)
            actions = self._schedule.ranks[self._place]
            return self._step.alternate(actions, arrived, self._early.of)

    def backward(self, grads: Sequence[Tensor], slots: Sequence[int]) -> list[Tensor | None]:
        """Add gradients to the weights' `grad`; return the gradients of the leaves `slots`."""
        self._begin_backward()
        factor = self._agree_on_factor(grads)
        sums = self._model.begin_backward()
        with torch.no_grad():
            for parameter, own in self._grads.items():
                grad = own if factor == 1 else own * factor
                if parameter.grad is None:
                    parameter.grad = grad
                else:
                    parameter.grad += grad
        self._grads = {}
        sums.finish()
        return self._leaf_grads(slots, factor)

    def _agree_on_factor(self, grads: Sequence[Tensor]) -> float:
        """Broadcast the factor for all gradients from the last stage's rank; raise if it is NaN."""
        transport, mesh = self._parts.transport, self._parts.transport.mesh
        device = transport.world.device
        factor = self._early.factor(grads) if mesh.is_last else 1.0
        shared = torch.tensor([factor], dtype=torch.float64, device=device)
        transport.broadcast(shared, mesh.rank_of(mesh.num_stages - 1), "control")
        factor = float(shared)
        if factor != factor:
            raise UnsupportedError(
                explain(
                    expected="the gradient of a micro-batch's outputs not to depend on the outputs "
                    "of other micro-batches, as in a sum or a mean over graphs or nodes",
                    found="a loss that joins graphs, or a training_step that is another one when "
                    "it runs again",
                    remedy="Use schedule='fill_drain', which needs the loss of all outputs only.",
                )
            )
        return factor


@contextmanager
def _apart(parameters: Iterable[nn.Parameter]) -> Iterator[Gradients]:
    """Yield a dict that holds the gradients computed in the block, once it ends; restore `grad`."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    found: Gradients = {}
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield found
        found.update({p: p.grad for p, _ in before if p.grad is not None})
    finally:
        for parameter, grad in before:
            parameter.grad = grad

"""Training by 1F1B and interleaved stages: micro-batches run backward before all have run forward.

    outputs, in the user's order     o0 o0 .. o1 o1 .. ..        two micro-batches have run
    rows that the loss reads         o0 o0 o0 o1 o1 o0 o1        copies fill the gaps
    gradients that are used          -- -- -- g1 g1 -- --        of the micro-batch that ran last

Exact if the loss is a sum of terms that each depend on one graph: means, masks, class weights and
heads with dropout are fine. Otherwise the gradients in the user's backward differ from the ones
used, and the step is refused before any weight changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnnpipe.chunks import PassSpec, Piece, own_random_stream
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers import intercept
from lightning_gnnpipe.schedule import Schedule, arrived_sends
from lightning_gnnpipe.steps import Controls, PipelinedModel, TrainingPass

Rebuild = Callable[[Sequence[Tensor]], Any]


class EarlyLoss:
    """Runs `training_step` again on given outputs; the engine host sets `run` before each step."""

    def __init__(self) -> None:
        self.run: Callable[[], Tensor] | None = None
        self._answers: list[Any] = []
        self.is_running = False

    def differentiate(self, outputs: Sequence[Tensor], rebuild: Rebuild) -> list[Tensor]:
        """Return the gradients of the loss with respect to `outputs`, zeros where it has none."""
        assert self.run is not None
        wanted = [output.requires_grad_() for output in outputs if _has_grad(output)]
        self._answers, self.is_running = [rebuild(outputs)], True
        try:
            loss = self.run()
        finally:
            self._answers, self.is_running = [], False
        found: dict[Tensor, Tensor | None] = {}
        if loss.requires_grad:
            with torch.autocast(loss.device.type, enabled=False):
                grads = torch.autograd.grad(loss, wanted, allow_unused=True)
            found = dict(zip(wanted, grads, strict=True))
        known = [(output, found.get(output)) for output in outputs]
        return [torch.zeros_like(output) if grad is None else grad for output, grad in known]

    def answer(self) -> Any:
        """Return the outputs to the step's call; raise if it calls twice or without gradients."""
        if self._answers and torch.is_grad_enabled():
            return self._answers.pop()
        raise UnsupportedError(
            expected="training_step to call the pipelined module once, with gradients, unless "
            "schedule='fill_drain'",
            found="a second call" if torch.is_grad_enabled() else "a call in torch.no_grad()",
            remedy="Call it once, or use schedule='fill_drain'.",
        )


_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_ROUGH = 2e-2  # half precision


Gradients = dict[nn.Parameter, Tensor]


class AlternatingPass(TrainingPass):
    """Training pass of alternating forwards and backwards, run in the user's forward call.

    It adds weight gradients to `grad` in the user's backward. Only the output gradients that arrive
    there show whether the early ones were right, and by what factor the loss was scaled.

    `rebuild`: from the outputs to what the user's call returns.
    """

    def __init__(
        self,
        spec: PassSpec,
        model: PipelinedModel,
        schedule: Schedule,
        loss: EarlyLoss,
        rebuild: Rebuild,
        *,
        is_exact: bool,
    ) -> None:
        super().__init__(spec, None, model, schedule, is_exact=is_exact)
        self._loss, self._rebuild = loss, rebuild
        self._grads: Gradients = {}  # of weights
        # On the rank of the last stage: places of the outputs so far, their gradients used.
        self._known: list[list[Tensor]] = [[] for _ in spec.outputs]
        self._used: list[Tensor] = []

    def forward(self, controls: Controls, number: int, *, is_first: bool = True) -> list[Tensor]:
        """Run both phases and return the detached outputs; see `TrainingPass`."""
        spec = self._spec
        self._watch(controls.on_chunk)
        spec.transport.meter.clear()
        with (
            intercept(self._model.intercepted, spec.context),
            own_random_stream(spec.transport.world.device),
            torch.enable_grad(),
            _apart(self._model.module.parameters()) as self._grads,
        ):
            arrived = arrived_sends(self._schedule, self._place)
            actions = self._schedule.ranks[self._place]
            return self._step.forward(actions, arrived, self._grads_of)

    def _grads_of(self, chunk: Piece, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the rows of `chunk`; `outputs` have all rows computed so far."""
        places = [self._spec.inputs.places(chunk, value) for value in self._spec.outputs]
        for known, new in zip(self._known, places, strict=True):
            known.append(new)
        self._used = self._used or [torch.zeros_like(output) for output in outputs]
        filled = [_fill(o, torch.cat(k)) for o, k in zip(outputs, self._known, strict=True)]
        grads = self._loss.differentiate(filled, self._rebuild)
        rows = [grad[place] for grad, place in zip(grads, places, strict=True)]
        for used, place, part in zip(self._used, places, rows, strict=True):
            used[place] = part
        return rows

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
        transport, mesh = self._spec.transport, self._spec.transport.mesh
        device = transport.world.device
        factor = self._factor(grads) if mesh.is_last else 1.0
        shared = torch.tensor([factor], dtype=torch.float64, device=device)
        transport.broadcast(shared, mesh.rank_of(mesh.num_stages - 1), "control")
        factor = float(shared)
        if factor != factor:
            raise UnsupportedError(
                expected="the gradient of a micro-batch's outputs not to depend on the outputs "
                "of other micro-batches, as in a sum or a mean over graphs or nodes",
                found="a loss that depends on several graphs together, or a training_step "
                "that gives another loss when it runs again",
                remedy="Use schedule='fill_drain', which computes the loss once, from all outputs.",
            )
        return factor

    def _factor(self, grads: Sequence[Tensor]) -> float:
        """Return the loss scaling: `grads` over the gradients used; NaN if not proportional."""
        known = [(u, g) for u, g in zip(self._used, grads, strict=True) if _has_grad(u)]
        pairs = [(_real(used).double(), _real(grad).double()) for used, grad in known]
        if any(not torch.equal(u.isfinite(), g.isfinite()) for u, g in pairs):
            return float("nan")
        finite = [(u.nan_to_num(0, 0, 0), g.nan_to_num(0, 0, 0)) for u, g in pairs]
        size = sum(float(used.square().sum()) for used, _ in finite)
        factor = sum(float((used * grad).sum()) for used, grad in finite) / size if size else 1.0
        for (used, grad), (value, _) in zip(finite, known, strict=True):
            tolerance = _TOLERANCE.get(_real(value).dtype, _ROUGH)
            factor = 1.0 if abs(factor - 1) <= tolerance else factor
            most = abs(factor) * _largest(used)
            if _largest(grad - factor * used) > tolerance * most:
                return float("nan")
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


def _fill(output: Tensor, known: Tensor) -> Tensor:
    """Return a copy of `output` whose rows outside of `known` repeat the rows `known` in turn."""
    filled = torch.zeros_like(output)
    if known.numel():
        is_missing = torch.ones(output.size(0), dtype=torch.uint8, device=output.device)
        is_missing.index_fill_(0, known, 0)
        num_missing = output.size(0) - known.numel()  # known as a number: a GPU need not be asked
        missing = is_missing.argsort(descending=True, stable=True)[:num_missing]
        turn = torch.arange(num_missing, device=known.device) % known.numel()
        filled[known], filled[missing] = output[known], output[known[turn]]
    return filled


def _has_grad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0

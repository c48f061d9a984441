"""Gradients of a micro-batch's outputs, before all micro-batches have run forward.

    outputs, in the user's order     o0 o0 .. o1 o1 .. ..        two micro-batches have run
    rows that the loss reads         o0 o0 o0 o1 o1 o0 o1        copies fill the gaps
    gradients that are used          -- -- -- g1 g1 -- --        of the micro-batch that ran last

Exact if the loss is a sum of terms that each depend on one graph: means, masks, class weights and
heads with dropout are fine. Otherwise the gradients in the user's backward differ from the ones
used, and the step is refused before any weight changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.chunks import PassSpec, Piece
from lightning_gnnpipe.errors import UnsupportedError, explain


class EarlyLoss:
    """Runs `training_step` again on given outputs; the engine host sets `run` before each step."""

    def __init__(self) -> None:
        self.run: Callable[[], Tensor] | None = None
        self._answers: list[Any] = []
        self.is_running = False

    def differentiate(
        self, outputs: Sequence[Tensor], rebuild: Callable[[Sequence[Tensor]], Any]
    ) -> list[Tensor]:
        """Return the gradients of the loss with respect to `outputs`, zeros where it has none."""
        assert self.run is not None
        wanted = [t.requires_grad_() for t in outputs if t.is_floating_point() or t.is_complex()]
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
            explain(
                expected="training_step to call the pipelined module once, with gradients, where "
                "micro-batches go back at once",
                found="a second call" if torch.is_grad_enabled() else "a call in torch.no_grad()",
                remedy="Call it once, or use schedule='fill_drain'.",
            )
        )


Differentiate = Callable[[list[Tensor]], list[Tensor]]
"""From all outputs to the gradients of the loss: zeros for those that have none."""

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
_ROUGH = 2e-2  # half precision


class EarlyGrads:
    """Gradients of the outputs of one step, used on the rank of the last stage."""

    def __init__(self, parts: PassSpec, differentiate: Differentiate) -> None:
        self._inputs, self._values = parts.inputs, parts.outputs
        self._differentiate = differentiate
        self._known: list[list[Tensor]] = [[] for _ in parts.outputs]
        self._used: list[Tensor] = []

    def of(self, chunk: Piece, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the output gradients for the rows of `chunk`, which has just run forward.

        `outputs`: each `[num_rows, *]`, in the user's order. Rows not computed yet are ignored.
        """
        places = [self._inputs.places(chunk, value) for value in self._values]
        for known, new in zip(self._known, places, strict=True):
            known.append(new)
        self._used = self._used or [torch.zeros_like(output) for output in outputs]
        filled = [_fill(o, torch.cat(k)) for o, k in zip(outputs, self._known, strict=True)]
        grads = self._differentiate(filled)
        rows = [grad[place] for grad, place in zip(grads, places, strict=True)]
        for used, place, part in zip(self._used, places, rows, strict=True):
            used[place] = part
        return rows

    def factor(self, grads: Sequence[Tensor]) -> float:
        """Return the loss scaling: `grads` over the gradients used; NaN if not proportional."""
        pairs = [
            (_real(used).double(), _real(grad).double())
            for used, grad in zip(self._used, grads, strict=True)
            if used.is_floating_point() or used.is_complex()
        ]
        if any(not torch.equal(u.isfinite(), g.isfinite()) for u, g in pairs):
            return float("nan")
        finite = [(u.nan_to_num(0, 0, 0), g.nan_to_num(0, 0, 0)) for u, g in pairs]
        size = sum(float(used.square().sum()) for used, _ in finite)
        factor = sum(float((used * grad).sum()) for used, grad in finite) / size if size else 1.0
        for (used, grad), value in zip(finite, self._floating(), strict=True):
            tolerance = _TOLERANCE.get(_real(value).dtype, _ROUGH)
            factor = 1.0 if abs(factor - 1) <= tolerance else factor
            most = abs(factor) * _largest(used)
            if _largest(grad - factor * used) > tolerance * most:
                return float("nan")
        return factor

    def _floating(self) -> list[Tensor]:
        return [used for used in self._used if used.is_floating_point() or used.is_complex()]


def _fill(output: Tensor, known: Tensor) -> Tensor:
    """Return a copy of `output` whose rows outside of `known` repeat the rows `known` in turn."""
    filled = torch.zeros_like(output)
    if known.numel():
        is_missing = torch.ones(output.size(0), dtype=torch.bool, device=output.device)
        is_missing[known] = False
        missing = is_missing.nonzero().flatten()
        turn = torch.arange(missing.numel(), device=known.device) % known.numel()
        filled[known], filled[missing] = output[known], output[known[turn]]
    return filled


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0

"""The user's loss, evaluated on given outputs while the step that called the module waits for them.

training_step(batch)                            the user's, on every rank
    net(batch)                                  the pipelined module: micro-batches forward and back
        training_step(batch)                    again, on the last stage, for a micro-batch
            net(batch)  ->  outputs so far      answered, not run
        <-  loss  ->  gradients of the outputs
    <-  all outputs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.errors import UnsupportedError, explain


class EarlyLoss:
    """Runs the user's step again, the pipelined module's call answered.

    Attributes:
        run: Runs it from its beginning and returns the loss; set by whoever drives the engine
            before each step.
    """

    def __init__(self) -> None:
        self.run: Callable[[], Tensor] | None = None
        self._answers: list[Any] = []
        self.is_running = False

    def differentiate(
        self, outputs: Sequence[Tensor], rebuild: Callable[[Sequence[Tensor]], Any]
    ) -> list[Tensor]:
        """Return the gradients of the loss with regard to `outputs`.

        Args:
            outputs: The model's, detached.
            rebuild: Puts them into the structure that the model returns.
        """
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
        """Return what the running step's call of the pipelined module is answered with.

        Raises:
            UnsupportedError: If it has been called already, or is called without gradients.
        """
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

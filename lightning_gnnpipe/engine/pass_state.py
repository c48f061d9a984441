"""Where the last training pass stands, and whether later passes may read what it has left.

forward: begin, end_forward  ->  the user's loss  ->  backward: begin_backward, end_backward
                             ->  abandon, where no backward comes, or a phase has failed
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PassState:
    """The state of one training pass after the other.

    Attributes:
        awaits_backward: Whether its forward is done, and its backward is still to come.
    """

    def __init__(self) -> None:
        self.awaits_backward = False
        self._is_inside = False  # a phase has begun, and has not ended
        self._outputs: Sequence[Tensor] = ()
        self._is_finite: Tensor | None = None  # a flag that is not read before it is asked for

    @property
    def is_lost(self) -> bool:
        """Whether it failed midway, or had outputs or gradients that are not finite."""
        is_finite = self._is_finite is None or bool(self._is_finite)
        return self._is_inside or not is_finite

    def begin(self) -> None:
        """Begin a pass that writes histories."""
        self._is_inside, self._is_finite = True, None

    def end_forward(self, outputs: Sequence[Tensor]) -> None:
        """Wait for the backward of the outputs, any shapes."""
        self._is_inside, self.awaits_backward, self._outputs = False, True, outputs

    def begin_backward(self, grads: Sequence[Tensor]) -> None:
        """Begin the backward phase with the gradients of the outputs, any shapes."""
        self._is_inside, self.awaits_backward, self._outputs = True, False, ()
        self._is_finite = _all_finite(grads)

    def end_backward(self, grads: Sequence[Tensor]) -> None:
        """End the pass, which has found gradients of parameters, any shapes."""
        self._is_inside = False
        found = _all_finite(grads)
        if found is not None:
            self._is_finite = found if self._is_finite is None else self._is_finite & found

    def settle(self) -> None:
        """End a pass without a backward, or take note that what was lost is dropped."""
        self._is_inside, self._is_finite = False, None

    def abandon(self) -> None:
        """Wait no longer for a backward; a phase that has not ended by now never will."""
        if self.awaits_backward:
            self._is_finite = _all_finite(self._outputs)
        self.awaits_backward, self._outputs = False, ()


def _all_finite(tensors: Sequence[Tensor]) -> Tensor | None:
    values = (one.coalesce().values() if one.is_sparse else one for one in tensors)
    found = [one.detach().isfinite().all() for one in values]
    return torch.stack(found).all() if found else None

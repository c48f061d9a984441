"""Loss scaling over stages: gradients that overflow on one stage make all of them skip the step.

A scaler looks at the gradients of its own process. Stages that decided by themselves would drift
apart: some would take a step, with another scale for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.comm import Transport


def share_overflows(scaler: torch.amp.GradScaler, transport: Transport) -> Callable[[], None]:
    """Let `scaler` find what any stage finds, from now on; return what gives it back as it was.

    All its ways lead through the method that is replaced on this one object: those of `unscale_`
    and of the check for optimizers that unscale by themselves (fused ones).
    """
    find_local = scaler._unscale_grads_

    def find(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = torch.zeros((), device=transport.axis.device)
        for one in find_local(*args, **kwargs).values():
            found += one.to(found.device)
        transport.all_reduce(found, "control")
        return {found.device: found.clamp_(max=1.0)}  # fused kernels ask whether it is 1

    scaler.__dict__["_unscale_grads_"] = find
    return lambda: scaler.__dict__.pop("_unscale_grads_", None)

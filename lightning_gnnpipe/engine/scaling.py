"""Loss scaling over stages: gradients that overflow on one stage make all of them skip the step.

A scaler looks at the gradients of its own process. Stages that decided by themselves would drift
apart: some would take a step, with another scale for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_gnnpipe import _compat_torch
from lightning_gnnpipe.comm import Transport


def share_overflows(
    scaler: torch.amp.GradScaler,
    transport: Transport,
    inside: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Let `scaler` find what any stage finds, from now on; return what gives it back as it was.

    It looks at gradients within the context `inside`.
    """

    def over_stages(found_here: Mapping[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        found = torch.zeros((), device=transport.world.device)
        for one in found_here.values():
            found += one.to(found.device)
        transport.all_reduce(found, "control")
        return {found.device: found.clamp_(max=1.0)}  # fused kernels ask whether it is 1

    return _compat_torch.change_overflows(scaler, over_stages, inside)

"""What is late in a checkpoint: what blocks of layers have for each other, and weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.history import LastWeights, LateGradients


def save_late(late: LateGradients) -> dict[str, Any]:
    """Return what waits on this rank in plain types; nothing is copied."""
    grads = [
        {"cut": cut, "value": name, "grad": grad}
        for cut, by_value in late.save().items()
        for name, grad in by_value.items()
    ]
    weights = late.weights
    return {
        "grads": grads,
        "weights": weights.values,
        "steps": weights.steps,
        "written": sorted(weights.written),
    }


def load_late(
    late: LateGradients,
    carried: Sequence[Mapping[str, Any]],
    alike: Sequence[Mapping[str, Any]],
    segments: Collection[int],
    device: torch.device,
) -> None:
    """Go on with what waited for the blocks that end with one of `segments`.

    Args:
        late: What waits.
        carried: What ranks have saved of which weights are taken.
        alike: Those of the same chunks: gradients of others are not.
        segments: The layers of this rank.
        device: Where they compute.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for rank in alike:
        for one in rank["grads"]:
            if one["cut"] - 1 in segments:
                found.setdefault(one["cut"], {})[one["value"]] = one["grad"].to(device)
    late.load(found)
    # Those of other ranks are of no use, and gone with the first step: they stay where they are.
    weights, steps = (
        {name: value for rank in carried for name, value in rank[of].items()}
        for of in ("weights", "steps")
    )
    written = {name for rank in carried for name in rank["written"]}
    late.weights = LastWeights(weights, steps, written)

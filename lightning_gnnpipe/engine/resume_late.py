"""What blocks of layers have for each other, in a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from lightning_gnnpipe.history import LateGradients, SavedLate


def save_late(late: LateGradients) -> list[dict[str, Any]]:
    """Return what waits on this rank in plain types; nothing is copied."""
    return [
        {"cut": cut, "value": name, "last": one.last, "before": one.before}
        for cut, grads in late.save().items()
        for name, one in grads.items()
    ]


def load_late(
    late: LateGradients,
    saved: Iterable[Mapping[str, Any]],
    segments: Collection[int],
    device: torch.device,
) -> None:
    """Go on with what waited for the blocks that end with one of `segments`.

    Args:
        late: What waits.
        saved: Of all ranks, of the same chunks.
        segments: The layers of this rank.
        device: Where they compute.
    """
    found: dict[int, dict[str, SavedLate]] = {}
    for one in saved:
        if one["cut"] - 1 in segments:
            before = None if one["before"] is None else one["before"].to(device)
            grads = found.setdefault(one["cut"], {})
            grads[one["value"]] = SavedLate(one["last"].to(device), before)
    late.load(found)

"""The states of all random streams of a process: torch's, Python's, NumPy's."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all random streams, including a GPU `device`."""
    algorithm, keys, position, has_gauss, cached = cast(Any, np.random.get_state())
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(algorithm), torch.from_numpy(keys.astype("int64")), position, has_gauss),
        "numpy_gauss": float(cached),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def random_number(device: torch.device) -> int:
    """Return a fingerprint of the states of all random streams."""
    _, keys, *place = cast(Any, np.random.get_state())
    found = zlib.crc32(keys.tobytes(), zlib.crc32(torch.get_rng_state().numpy().tobytes()))
    found = zlib.crc32(repr(place).encode(), found)
    if device.type == "cuda":
        found = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), found)
    return found ^ (hash(random.getstate()[1]) & 0xFFFFFFFF)


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of `random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    algorithm, keys, position, has_gauss = state["numpy"]
    keys = keys.numpy().astype("uint32")
    np.random.set_state((algorithm, keys, position, has_gauss, state["numpy_gauss"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

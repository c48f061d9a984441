"""The device of tests that `scripts/check_gpu.sh` runs on a GPU; the CPU otherwise."""

from __future__ import annotations

import os

import torch

_NAME = os.environ.get("GNNPIPE_DEVICE", "cpu")
DEVICE = torch.device(_NAME, 0) if _NAME == "cuda" else torch.device(_NAME)

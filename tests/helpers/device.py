"""The device of tests that `scripts/check_gpu.sh` runs on a GPU; the CPU otherwise."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("GNNPIPE_DEVICE", "cpu"))

"""The command line: train, evaluate and predict as LightningCLI does, and `plan`."""

from __future__ import annotations

__all__ = []

"""Warnings of fallbacks: the package does something else than the user has asked for.

A slower way to the same result is no fallback.
"""

from __future__ import annotations

import logging


class Fallbacks:
    """Warns of fallbacks, each once; quiet if another rank warns."""

    def __init__(self, log: logging.Logger, *, is_quiet: bool = False) -> None:
        self._log, self._is_quiet = log, is_quiet
        self._told: set[tuple[str, str]] = set()

    def tell(self, why: str, *, origin: str, to: str, remedy: str = "") -> None:
        """Warn once that `to` replaces `origin` because of `why`; `remedy`: whole sentences."""
        if not self._is_quiet and (origin, to) not in self._told:
            self._told.add((origin, to))
            self._log.warning("%s: from %s to %s.%s", why, origin, to, remedy and f" {remedy}")

"""Warnings of fallbacks: the package does something else than the user has asked for.

What is only slower than it could be, and gives the same, is no fallback.
"""

from __future__ import annotations

import logging


class Fallbacks:
    """Tells of fallbacks, each once.

    Args:
        log: Of the module where they happen.
        is_quiet: Whether another rank tells of them.
    """

    def __init__(self, log: logging.Logger, *, is_quiet: bool = False) -> None:
        self._log, self._is_quiet = log, is_quiet
        self._told: set[tuple[str, str]] = set()

    def tell(self, why: str, *, origin: str, to: str, remedy: str = "") -> None:
        """Warn once that `to` replaces `origin`.

        Args:
            why: What has made it necessary.
            origin: What was asked for.
            to: What is done.
            remedy: What to do about it, in whole sentences.
        """
        if not self._is_quiet and (origin, to) not in self._told:
            self._told.add((origin, to))
            self._log.warning("%s: from %s to %s.%s", why, origin, to, remedy and f" {remedy}")

"""Errors that users can meet; each states the expectation, the finding and a remedy."""

from __future__ import annotations


class GNNPipeError(ValueError):
    """Base of all errors of this package that a user can fix.

    Args:
        text: The whole text, or else:
        expected: A clause.
        found: A clause.
        remedy: Whole sentences.
    """

    def __init__(
        self, text: str = "", *, expected: str = "", found: str = "", remedy: str = ""
    ) -> None:
        super().__init__(text or explain(expected=expected, found=found, remedy=remedy))


class ConfigError(GNNPipeError):
    """An option, or a combination of options and devices, cannot work."""


class GraphError(GNNPipeError):
    """The graph, or a tensor that belongs to it, is malformed."""


class UnsupportedError(GNNPipeError):
    """The model does something that cannot be pipelined exactly."""


class ScheduleError(GNNPipeError):
    """A list of actions is incomplete, out of order, or would deadlock."""


class CheckpointError(GNNPipeError):
    """A checkpoint cannot be read, or does not belong to this run."""


class PeerError(RuntimeError):
    """Another rank failed, or did not answer within the timeout."""


def explain(*, expected: str, found: str, remedy: str) -> str:
    """Return an error text; `expected` and `found` are clauses, `remedy` is whole sentences."""
    return f"Expected {expected} (got {found}). {remedy}"


def first_line(error: Exception) -> str:
    """Return the first line of the text of an error."""
    return str(error).partition("\n")[0]

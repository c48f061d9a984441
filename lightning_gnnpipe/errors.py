"""Errors that users can meet; each text says what was expected, found, and what to do."""

from __future__ import annotations


class GNNPipeError(ValueError):
    """Base of all errors of this package that a user can fix."""


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
    """Return the text of an error.

    Args:
        expected: A clause after "Expected", without a full stop.
        found: A clause after "got", without brackets.
        remedy: One or two whole sentences.
    """
    return f"Expected {expected} (got {found}). {remedy}"


def first_line(error: Exception) -> str:
    """Return the first line of the text of an error."""
    return str(error).partition("\n")[0]

"""Errors and warnings that users can meet.

Each error states the expectation, the finding and a remedy. A fallback, which does something else
than the user has asked for, warns once. A slower way to the same result is no fallback. Removed
names and values of options have advice on what to write instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec

P = ParamSpec("P")

_DEFAULT = "Leave 'staleness' out: its default, 'drift', takes its place."
_INT8 = "Write 'int8' for smaller errors, or 'int1' for fewer bits."
_START = "Leave 'start_method' out: its default, 'popen', runs the script again on each device."
_DEFAULT_METHODS = ("lookahead", "delayed", "predicted", "blocks", "scaled")
REMOVED_VALUES = dict.fromkeys(_DEFAULT_METHODS, _DEFAULT) | {
    "spawn": _START,
    "forkserver": _START,
    "fp16": "Write 'bf16', which is as short and does not overflow.",
    "int4": _INT8,
    "int2": _INT8,
    "drive": "Write 'int1', which has as few bits.",
}

REMOVED_CLASSES = {
    "AdaptiveHalo": "Use BoundedStaleness, or a 'halo_codec' of more bits.",
    "AdaptiveStaleness": "Use StalenessWarmup for exact epochs, and StalenessMonitor to see drift.",
    "ChunkProgress": "Use Trainer(profiler='pytorch'), which shows the chunks of a step.",
    "check": "Use print(GNNPipeStrategy().plan(module, data)).",
    "StalenessMethod": "Use a name of 'staleness': 'drift', the default, 'constant' or 'gnnpipe'.",
}

REMOVED_OPTIONS = {
    "changing_inputs": "An input runs exactly when it comes for the first time, then pipelined. "
    "Draw random numbers in the module's forward, as in F.dropout(x) or torch.rand_like(x), so "
    "that its inputs stay the same. Leave 'changing_inputs' out.",
    "chunk_order": "Each step draws an order of its own. Leave 'chunk_order' out.",
    "guard": "A jump of the loss no longer makes the next step exact. Leave 'guard' out, and add "
    "Trainer(callbacks=[StalenessWarmup(5), EmbeddingRefresh(1)]) if the loss jumps.",
    "logs_staleness": "Leave 'logs_staleness' out, and add StalenessMonitor() for its keys.",
    "save_distributed_checkpoint": "Every process holds all weights, and a checkpoint is one file. "
    "Leave 'save_distributed_checkpoint' out.",
    "num_virtual": "Each process holds one stage. Leave 'num_virtual' out.",
    "schedule": "All micro-batches run forward, then all backward (fill-drain). Leave 'schedule' "
    "out, and write recompute=True, or Trainer(accumulate_grad_batches=n) with smaller batches, "
    "for less memory.",
}


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


class CheckpointError(GNNPipeError):
    """A checkpoint cannot be read, or does not belong to this run."""


class PeerError(RuntimeError):
    """Another rank failed, or did not answer within the timeout. It is not a `GNNPipeError`."""


def explain(*, expected: str, found: str, remedy: str) -> str:
    """Return an error text; `expected` and `found` are clauses, `remedy` is whole sentences."""
    return f"Expected {expected} (got {found}). {remedy}"


def checks_names(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a constructor so that it says what to write in place of an unknown option.

    Raises:
        TypeError: If an option never existed, or has to be named.
        ConfigError: If an option was removed.
    """
    known = signature(init).parameters
    num_unnamed = sum(one.kind is not Parameter.KEYWORD_ONLY for one in known.values())

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for option in (one for one in kwargs if one not in known):
            if option in REMOVED_OPTIONS:
                raise ConfigError(f"The option '{option}' was removed. {REMOVED_OPTIONS[option]}")
            near = [f". Did you mean '{one}'?" for one in get_close_matches(option, known, 1)]
            text = f"{init.__qualname__}() got an unexpected keyword argument '{option}'"
            raise TypeError("".join([text, *near]))
        if len(args) > num_unnamed == 1:
            owner, (_, first, *_) = init.__qualname__.split(".")[0], known
            text = f"{owner}() takes each option by its name, such as {first}=..."
            raise TypeError(f"{text}; help({owner}) lists them.")
        init(*args, **kwargs)

    return checked


def first_line(error: Exception) -> str:
    """Return the first line of the text of an error."""
    return str(error).partition("\n")[0]


class Fallbacks:
    """Warns of fallbacks, each once: what happens, and why. Quiet if another rank warns."""

    def __init__(self, log: logging.Logger, *, is_quiet: bool = False) -> None:
        self._log, self._is_quiet = log, is_quiet
        self._known: set[str] = set()

    def tell(self, text: str, *values: object) -> None:
        """Warn with `text`, which `values` fill in, once for each text."""
        if not self._is_quiet and text not in self._known:
            self._known.add(text)
            self._log.warning(text, *values)


def advice_on(value: object) -> str | None:
    """Return advice for a removed option value, or a pair; None if it never existed."""
    names = value if isinstance(value, (tuple, list)) else [value]
    known = [
        REMOVED_VALUES[name] for name in names if isinstance(name, str) and name in REMOVED_VALUES
    ]
    return " ".join(dict.fromkeys(known)) or None

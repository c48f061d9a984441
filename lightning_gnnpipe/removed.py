"""Advice for removed option values and classes, by name."""

from __future__ import annotations

_DEFAULT = "Leave 'staleness' out: its default, 'drift', takes its place."
_INT8 = "Write 'int8' for smaller errors, or 'int1' for fewer bits."
_DEFAULT_METHODS = ("lookahead", "delayed", "predicted", "blocks", "scaled")
_DEFAULT_CLASSES = (
    "AdaptiveGradients",
    "BlockGradients",
    "DelayedGradients",
    "ExtrapolatedRows",
    "SmoothedRows",
)

VALUES = dict.fromkeys(_DEFAULT_METHODS, _DEFAULT) | {
    "mirrored": "Write 'shuffled', the default.",
    "fp16": "Write 'bf16', which is as short and does not overflow.",
    "int4": _INT8,
    "int2": _INT8,
    "drive": "Write 'int1', which has as few bits.",
}

CLASSES = dict.fromkeys(_DEFAULT_CLASSES, _DEFAULT) | {
    "AdaptiveHalo": "Use BoundedStaleness, or a 'halo_codec' of more bits.",
    "AdaptiveStaleness": "Use StalenessWarmup for exact epochs, and StalenessMonitor to see drift.",
    "DroppedGradients": "Use staleness='constant', or 'gnnpipe' for a scale of 2.",
    "LastRows": "Use staleness='constant'.",
    "RenewedRows": "Use the callback EmbeddingRefresh(every_n_epochs=n, how='exact').",
    "SnapshotRows": "Use staleness='gnnpipe', or the callback EmbeddingRefresh(every_n_epochs=n, "
    "how='snapshot').",
    "StalenessMethod": "Use a name of 'staleness': 'drift', the default, 'constant' or 'gnnpipe'.",
}


def advice_on(value: object) -> str | None:
    """Return advice for a removed option value, or a pair; None if it never existed."""
    names = value if isinstance(value, (tuple, list)) else [value]
    known = [VALUES[name] for name in names if isinstance(name, str) and name in VALUES]
    return " ".join(dict.fromkeys(known)) or None

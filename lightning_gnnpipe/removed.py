"""Advice for removed option values and classes, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_DEFAULT = "Leave 'staleness' out: its default, 'drift', takes its place."
_NAMED = "Use a name of 'staleness': 'drift', the default, 'constant' or 'gnnpipe'."
_LAST = "Use staleness='constant'."
_RENEWED = "Use the callback EmbeddingRefresh(every_n_epochs=n, how='exact')."
_SNAPSHOT = (
    "Use staleness='gnnpipe', or the callback EmbeddingRefresh(every_n_epochs=n, how='snapshot')."
)
_SHUFFLED = "Write 'shuffled', the default."
_BF16 = "Write 'bf16', which is as short and does not overflow."
_INT8 = "Write 'int8' for smaller errors, or 'int1' for fewer bits."
_INT1 = "Write 'int1', which has as few bits."

VALUES: Mapping[str, str] = MappingProxyType(
    {
        "lookahead": _DEFAULT,
        "delayed": _DEFAULT,
        "predicted": _DEFAULT,
        "blocks": _DEFAULT,
        "scaled": _DEFAULT,
        "mirrored": _SHUFFLED,
        "fp16": _BF16,
        "int4": _INT8,
        "int2": _INT8,
        "drive": _INT1,
    }
)

CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "AdaptiveGradients": _DEFAULT,
        "AdaptiveHalo": "Use BoundedStaleness, or a 'halo_codec' of more bits.",
        "AdaptiveStaleness": "Use StalenessWarmup for exact epochs, and StalenessMonitor to see "
        "drift.",
        "BlockGradients": _DEFAULT,
        "DelayedGradients": _DEFAULT,
        "DroppedGradients": "Use staleness='constant', or 'gnnpipe' for a scale of 2.",
        "ExtrapolatedRows": _DEFAULT,
        "LastRows": _LAST,
        "RenewedRows": _RENEWED,
        "SmoothedRows": _DEFAULT,
        "SnapshotRows": _SNAPSHOT,
        "StalenessMethod": _NAMED,
    }
)


def advice_on(value: object) -> str | None:
    """Return advice for a removed option value, or a pair; None if it never existed."""
    names = value if isinstance(value, (tuple, list)) else [value]
    found = dict.fromkeys(
        VALUES[name] for name in names if isinstance(name, str) and name in VALUES
    )
    return " ".join(found) or None

"""Message passing on one chunk: rows of other chunks come from histories."""

from __future__ import annotations

from lightning_gnnpipe.passing.aggregate import (
    ROWS,
    LinearRule,
    aggregate,
    linear_rule,
    push_pull,
)
from lightning_gnnpipe.passing.context import (
    InLayer,
    MessageContext,
    TapedContext,
    replace_attributes,
    replaces,
)
from lightning_gnnpipe.passing.interfaces import (
    CallKey,
    EdgeLeaves,
    ShardLink,
    Tape,
)

__all__ = [
    "ROWS",
    "CallKey",
    "EdgeLeaves",
    "InLayer",
    "LinearRule",
    "MessageContext",
    "ShardLink",
    "Tape",
    "TapedContext",
    "aggregate",
    "linear_rule",
    "push_pull",
    "replace_attributes",
    "replaces",
]

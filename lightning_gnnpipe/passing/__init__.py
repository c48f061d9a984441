"""Message passing on one chunk: rows of other chunks come from histories."""

from __future__ import annotations

from lightning_gnnpipe.passing.aggregate import ROWS, LinearRule, aggregate, linear_rule
from lightning_gnnpipe.passing.context import InLayer, MessageContext, replaces
from lightning_gnnpipe.passing.interfaces import (
    CallKey,
    EdgeLeaves,
    MomentSource,
    RowMoments,
    ShardLink,
    Tape,
)
from lightning_gnnpipe.passing.pushpull import push_pull

__all__ = [
    "ROWS",
    "CallKey",
    "EdgeLeaves",
    "InLayer",
    "LinearRule",
    "MessageContext",
    "MomentSource",
    "RowMoments",
    "ShardLink",
    "Tape",
    "aggregate",
    "linear_rule",
    "push_pull",
    "replaces",
]

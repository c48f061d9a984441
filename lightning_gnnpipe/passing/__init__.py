"""Message passing on one chunk: rows of other chunks come from histories."""

from __future__ import annotations

from lightning_gnnpipe.passing.aggregate import (
    ROWS,
    LinearRule,
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
from lightning_gnnpipe.passing.lookups import Lookups, lookups_of
from lightning_gnnpipe.passing.matrix import (
    ChunkMatrix,
    Entries,
    Matrices,
    assemble,
    is_matrix,
    multiply_matrix,
    refuse_shape,
)

__all__ = [
    "ROWS",
    "CallKey",
    "ChunkMatrix",
    "EdgeLeaves",
    "Entries",
    "InLayer",
    "LinearRule",
    "Lookups",
    "Matrices",
    "MessageContext",
    "ShardLink",
    "Tape",
    "TapedContext",
    "assemble",
    "is_matrix",
    "linear_rule",
    "lookups_of",
    "multiply_matrix",
    "push_pull",
    "refuse_shape",
    "replace_attributes",
    "replaces",
]

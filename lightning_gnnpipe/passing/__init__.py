"""Message passing on one chunk: rows of other chunks come from histories."""

from lightning_gnnpipe.passing.aggregate import (
    ROWS,
    BoundHalo,
    CallKey,
    LinearRule,
    linear_rule,
)
from lightning_gnnpipe.passing.context import (
    InLayer,
    MessageContext,
    Replacement,
    replace_all,
    replace_attributes,
    replaces,
)
from lightning_gnnpipe.passing.edges import EdgeBytes, GraphEdges
from lightning_gnnpipe.passing.masks import Masks, dropout
from lightning_gnnpipe.passing.matrix import (
    ChunkMatrix,
    Entries,
    Matrices,
    assemble,
    is_matrix,
    refuse_shape,
    turn_edges,
)

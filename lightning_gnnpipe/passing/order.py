"""Layers that tell the edges of a node apart by their order.

MeshCNNConv reads edges 4 i, ..., 4 i + 3 as the neighbours a, b, c and d. Plans sort edges by their
targets and keep the order of edges with one target: such a group stays whole if its edges have one
target, and is torn apart, on one chunk as well, if they do not.
"""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe._compat_pyg import MESH_CNN_CONV
from lightning_gnnpipe.errors import UnsupportedError, explain
from lightning_gnnpipe.passing.context import MessageContext

_GROUP = 4


def check_order(
    name: str, conv: MessagePassing, edge_index: Tensor, context: MessageContext
) -> None:
    """Refuse edges, given to `propagate` of layer `name`, whose order the layer would misread.

    Raises:
        UnsupportedError: If the layer reads them in groups, and a group's edges differ in their
            targets, or the model changed the edges.
    """
    if not isinstance(conv, MESH_CNN_CONV):
        return
    is_own = edge_index is context.chunk.edge_index and not context.edges_key[1]
    if is_own and context.functions.has_groups(context.plan, _GROUP):
        return
    raise UnsupportedError(
        explain(
            expected=f"the edges of layer '{name}', a {type(conv).__name__}, in groups of {_GROUP} "
            "with the same target",
            found="groups with several targets" if is_own else "edges that the model changed",
            remedy="Have columns 4 i, ..., 4 i + 3 of 'edge_index' be (a, i), (b, i), (c, i) and "
            "(d, i): the receiver is in row 1; and flip edges before they are passed in.",
        )
    )

"""Small graphs, drawn: what kinds of edges they have, and what comes with the edges."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class GraphDraw:
    """What a graph is like.

    Attributes:
        num_nodes: Of the graph.
        num_edges: That are drawn, before some are added.
        is_undirected: Whether each edge is there both ways.
        has_isolated: Whether the last two nodes have no edge.
        has_loops: Whether some edges are loops.
        has_duplicates: Whether some edges are there twice.
        weights: Whether `edge_weight` is there.
        attributes: Whether `edge_attr` is there.
        seed: Of the numbers.
    """

    num_nodes: int = 12
    num_edges: int = 30
    is_undirected: bool = True
    has_isolated: bool = False
    has_loops: bool = False
    has_duplicates: bool = False
    weights: bool = False
    attributes: bool = False
    seed: int = 0


def draw_graph(random: Random) -> GraphDraw:
    """Return any graph."""
    num_nodes = random.randint(8, 24)
    return GraphDraw(
        num_nodes,
        random.randint(num_nodes, 4 * num_nodes),
        *(random.random() < share for share in (0.6, 0.3, 0.3, 0.3, 0.4, 0.4)),
        seed=random.randint(0, 999),
    )


def graph_text(draw: GraphDraw) -> str:
    """Return `make_graph`, which makes others of the kind for other numbers."""
    last = draw.num_nodes - 2 if draw.has_isolated else draw.num_nodes
    lines = [
        "def make_graph(number=0):",
        f"    draw = torch.Generator().manual_seed({draw.seed} + number)",
        f"    edge_index = torch.randint(0, {last}, (2, {draw.num_edges}), generator=draw)",
        "    edge_index = edge_index[:, edge_index[0] != edge_index[1]]",
    ]
    if draw.is_undirected:
        lines.append("    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)")
    lines.append("    edge_index = edge_index.unique(dim=1)")
    if draw.has_loops:
        lines.append("    edge_index = torch.cat([edge_index, torch.tensor([[0, 3], [0, 3]])], 1)")
    if draw.has_duplicates:
        lines.append("    edge_index = torch.cat([edge_index, edge_index[:, :3]], 1)")
    lines += [
        f"    num_nodes, num_edges = {draw.num_nodes}, edge_index.size(1)",
        "    node = torch.arange(num_nodes)",
        "    data = Data(",
        "        x=torch.randn(num_nodes, 5, generator=draw), edge_index=edge_index,",
        "        y=torch.randint(0, 3, (num_nodes,), generator=draw),",
        "        train_mask=node % 3 != 1, val_mask=node % 3 == 1, test_mask=node % 4 == 1,",
        "    )",
    ]
    if draw.weights:
        lines.append("    data.edge_weight = torch.rand(num_edges, generator=draw) + 0.5")
    if draw.attributes:
        lines.append("    data.edge_attr = torch.randn(num_edges, 3, generator=draw)")
    return "\n".join([*lines, "    return data"])

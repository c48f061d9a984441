"""Small graphs and networks, drawn: kinds of edges, layers, norms, skips, forms of forward."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random


@dataclass(frozen=True)
class GraphDraw:
    """What a graph is like."""

    num_nodes: int = 12
    num_edges: int = 30  # that are drawn, before some are added
    is_undirected: bool = True
    has_isolated: bool = False  # the last two nodes have no edge
    has_loops: bool = False
    has_duplicates: bool = False
    weights: bool = False  # `edge_weight` is there
    attributes: bool = False  # `edge_attr` is there
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


_GRAPH = """
    draw = torch.Generator().manual_seed(seed + number)
    last = num_nodes - 2 if has_isolated else num_nodes
    edge_index = torch.randint(0, last, (2, num_edges), generator=draw)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    if is_undirected:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    edge_index = edge_index.unique(dim=1)
    loops = torch.tensor([[0, 3], [0, 3]])[:, : 2 * has_loops]
    edge_index = torch.cat([edge_index, loops, edge_index[:, : 3 * has_duplicates]], 1)
    node, num_edges = torch.arange(num_nodes), edge_index.size(1)
    data = Data(
        x=torch.randn(num_nodes, 5, generator=draw), edge_index=edge_index,
        y=torch.randint(0, 3, (num_nodes,), generator=draw),
        train_mask=node % 3 != 1, val_mask=node % 3 == 1, test_mask=node % 4 == 1,
    )
    if weights:
        data.edge_weight = torch.rand(num_edges, generator=draw) + 0.5
    if attributes:
        data.edge_attr = torch.randn(num_edges, 3, generator=draw)
    return data
"""


def graph_text(draw: GraphDraw) -> str:
    """Return `make_graph`, which makes others of the kind for other numbers."""
    options = ", ".join(f"{name}={value}" for name, value in asdict(draw).items())
    return f"def make_graph(number=0, {options}):{_GRAPH.rstrip()}"


_MLP = "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))"
_DEG = "torch.tensor([1, 3, 5, 4, 2, 1])"

# name: (how it is made, what it takes beside x and edge_index, whether the oracle knows it)
CONVS: dict[str, tuple[str, str, bool]] = {
    "GCN": ("gnn.GCNConv(8, 8)", "weight", True),
    "SAGE": ("gnn.SAGEConv(8, 8)", "", True),
    "SAGE max": ("gnn.SAGEConv(8, 8, aggr='max', project=True)", "", True),
    "GraphConv": ("gnn.GraphConv(8, 8, aggr='mean')", "weight", True),
    "GAT": ("gnn.GATConv(8, 4, heads=2)", "", True),
    "GAT edges": ("gnn.GATConv(8, 4, heads=2, edge_dim=3)", "attr", True),
    "GATv2": ("gnn.GATv2Conv(8, 4, heads=2)", "", True),
    "GIN": (f"gnn.GINConv({_MLP}, train_eps=True)", "", True),
    "GINE": (f"gnn.GINEConv({_MLP}, edge_dim=3)", "attr", True),
    "Transformer": ("gnn.TransformerConv(8, 4, heads=2, beta=True)", "", True),
    "PNA": (f"gnn.PNAConv(8, 8, ['mean', 'max', 'sum'], ['identity', 'amplification'], {_DEG})",
            "", False),
    "GCN2": ("gnn.GCN2Conv(8, alpha=0.2)", "x0", True),
    "TAG": ("gnn.TAGConv(8, 8, K=2)", "weight", True),
    "SG": ("gnn.SGConv(8, 8, K=2)", "weight", True),
    "APPNP": ("gnn.APPNP(K=2, alpha=0.1)", "weight", True),
    "ResGated": ("gnn.ResGatedGraphConv(8, 8)", "", True),
    "EdgeConv": ("gnn.EdgeConv(nn.Linear(16, 8))", "", True),
}  # fmt: skip

# name: (how it is made, whether it sees one row at a time)
NORMS: dict[str, tuple[str, bool]] = {
    "none": ("nn.Identity()", True),
    "layer": ("nn.LayerNorm(8)", True),
    "layer by graph": ("gnn.LayerNorm(8)", False),
    "batch": ("gnn.BatchNorm(8)", False),
    "graph": ("gnn.GraphNorm(8)", False),
    "pair": ("gnn.PairNorm()", False),
}

SKIPS = {
    "none": "x = ACT(NORM(h))",
    "residual": "x = x + ACT(NORM(h))",
    "pre": "x = x + h",
    "first": "x = ACT(NORM(h)) + 0.5 * x0",
}


@dataclass(frozen=True)
class NetDraw:
    """A network of 5 features, 8 channels and 3 classes."""

    layers: tuple[str, ...]  # of `CONVS`
    norm: str = "none"
    skip: str = "none"
    jump: str = ""  # of JumpingKnowledge
    act: str = "torch.tanh"
    is_loop: bool = True  # where all layers are alike
    dropout: float = 0.0  # between layers: plain runs draw other numbers

    @property
    def is_rowwise(self) -> bool:
        """Whether nodes see each other through messages alone that the oracle knows."""
        return NORMS[self.norm][1] and all(CONVS[layer][2] for layer in self.layers)

    @property
    def has(self) -> set[str]:
        """What habits may need."""
        is_alike = self.layers[0] in ("GCN", "SAGE", "GAT") and len(set(self.layers)) == 1
        found = {"tie": self.layers[:2] == ("GCN", "GCN"), "alike": is_alike}
        return {name for name, is_there in found.items() if is_there}


def draw_net(random: Random, graph: GraphDraw) -> NetDraw:
    """Return a network for this graph."""
    num_layers = random.randint(2, 6)
    known = [n for n, (_, takes, _) in CONVS.items() if takes != "attr" or graph.attributes]
    is_alike = random.random() < 0.6
    names = [random.choice(known)] * num_layers if is_alike else random.choices(known, k=num_layers)
    norm = random.choice(list(NORMS)) if random.random() < 0.6 else "none"
    return NetDraw(
        tuple(names),
        norm,
        random.choice(list(SKIPS)),
        random.choice(["", "", "", "cat", "max", "lstm"]),
        random.choice(["torch.tanh", "torch.relu", "F.elu", "F.silu"]),
        is_alike and random.random() < 0.7,
        random.choice([0.3, 0.5]) if random.random() < 0.1 else 0.0,
    )


def call_arguments(draw: NetDraw, graph: GraphDraw) -> str:
    """Return how `forward` is called."""
    return ", ".join(["x", "edge_index", *(f"data.{name}" for name in _extra(draw, graph))])


def _extra(draw: NetDraw, graph: GraphDraw) -> list[str]:
    takes = {CONVS[layer][1] for layer in draw.layers}
    weights = ["edge_weight"] if "weight" in takes and graph.weights else []
    return [*weights, *(["edge_attr"] if "attr" in takes else [])]


def net_text(draw: NetDraw, graph: GraphDraw) -> str:
    """Return the class."""
    arguments = [f"{name}=None" for name in _extra(draw, graph)]
    convs = ",\n".join(f"            {CONVS[layer][0]}" for layer in draw.layers)
    norm = NORMS[draw.norm][0]
    jump = f"gnn.JumpingKnowledge('{draw.jump}', 8, {len(draw.layers)})" if draw.jump else None
    width = 8 * len(draw.layers) if draw.jump == "cat" else 8
    lines = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.lin_in = nn.Linear(5, 8)",
        "        self.convs = nn.ModuleList([",
        f"{convs},",
        "        ])",
        f"        self.norms = nn.ModuleList({norm} for _ in self.convs)",
        *([f"        self.jump = {jump}"] if jump else []),
        f"        self.lin_out = nn.Linear({width}, 3)",
        "        <<net_init>>",
        "",
        f"    def forward({', '.join(['self', 'x', 'edge_index', *arguments])}):",
        "        <<forward_start>>",
        "        x = x0 = self.lin_in(x)",
        *(["        xs = []"] if jump else []),
        *_layer_lines(draw, graph.weights),
        *(["        x = self.jump(xs)"] if jump else []),
        "        <<forward_end>>",
        "        out = self.lin_out(x)",
        "        <<out>>",
        "        return out",
    ]
    return "\n".join(lines)


def _layer_lines(draw: NetDraw, has_weights: bool) -> list[str]:
    """Return forward over the layers, in a loop or one by one."""
    if draw.is_loop and len(set(draw.layers)) == 1:
        one = _one_layer(draw, draw.layers[0], "conv", "norm", has_weights)
        head = "        for conv, norm in zip(self.convs, self.norms, strict=True):"
        return [head, *(f"    {line}" for line in one)]
    return [
        line
        for i, layer in enumerate(draw.layers)
        for line in _one_layer(draw, layer, f"self.convs[{i}]", f"self.norms[{i}]", has_weights)
    ]


def _one_layer(draw: NetDraw, layer: str, conv: str, norm: str, has_weights: bool) -> list[str]:
    takes = CONVS[layer][1]
    given = {"weight": ", edge_weight" if has_weights else "", "attr": ", edge_attr"}
    call = f"{conv}(x, {'x0, ' if takes == 'x0' else ''}edge_index{given.get(takes, '')})"
    skip = SKIPS[draw.skip].replace("ACT", draw.act).replace("NORM", norm)
    lines = [f"h = {call}", "<<in_layer>>", skip]
    if draw.skip == "pre":
        lines[0] = f"h = {call.replace('(x,', f'({draw.act}({norm}(x)),', 1)}"
    if draw.dropout:
        lines.append(f"x = F.dropout(x, {draw.dropout}, self.training)")
    if draw.jump:
        lines.append("xs.append(x)")
    return [f"        {line}" for line in lines]

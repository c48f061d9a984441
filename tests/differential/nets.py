"""Small networks, drawn: which layers, norms, skips, and how forward is written."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.differential.graphs import GraphDraw

_MLP = "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))"
_DEG = "torch.tensor([1, 3, 5, 4, 2, 1])"

# name: (how it is made, what it takes beside x and edge_index, whether the oracle knows it)
CONVS: dict[str, tuple[str, str, bool]] = {
    "GCN": ("gnn.GCNConv(8, 8)", "weight", True),
    "GCN improved": ("gnn.GCNConv(8, 8, improved=True, bias=False)", "weight", True),
    "SAGE": ("gnn.SAGEConv(8, 8)", "", True),
    "SAGE max": ("gnn.SAGEConv(8, 8, aggr='max', project=True)", "", True),
    "GraphConv": ("gnn.GraphConv(8, 8, aggr='mean')", "weight", True),
    "GAT": ("gnn.GATConv(8, 4, heads=2)", "", True),
    "GAT edges": ("gnn.GATConv(8, 4, heads=2, edge_dim=3)", "attr", True),
    "GATv2": ("gnn.GATv2Conv(8, 4, heads=2)", "", True),
    "GATv2 shared": ("gnn.GATv2Conv(8, 8, share_weights=True, residual=True)", "", True),
    "GIN": (f"gnn.GINConv({_MLP}, train_eps=True)", "", True),
    "GINE": (f"gnn.GINEConv({_MLP}, edge_dim=3)", "attr", True),
    "Transformer": ("gnn.TransformerConv(8, 4, heads=2, beta=True)", "", True),
    "Transformer edges": ("gnn.TransformerConv(8, 8, edge_dim=3)", "attr", True),
    "PNA": (f"gnn.PNAConv(8, 8, ['mean', 'max', 'sum'], ['identity', 'amplification'], {_DEG})",
            "", False),
    "GEN": ("gnn.GENConv(8, 8, learn_t=True)", "", False),
    "GCN2": ("gnn.GCN2Conv(8, alpha=0.2)", "x0", True),
    "TAG": ("gnn.TAGConv(8, 8, K=2)", "weight", True),
    "SG": ("gnn.SGConv(8, 8, K=2)", "weight", True),
    "APPNP": ("gnn.APPNP(K=2, alpha=0.1)", "weight", True),
    "ResGated": ("gnn.ResGatedGraphConv(8, 8)", "", True),
    "EdgeConv": ("gnn.EdgeConv(nn.Linear(16, 8))", "", True),
    "LE": ("gnn.LEConv(8, 8)", "weight", False),
    "Cluster": ("gnn.ClusterGCNConv(8, 8)", "", False),
    "ARMA": ("gnn.ARMAConv(8, 8)", "weight", False),
    "FiLM": ("gnn.FiLMConv(8, 8)", "", False),
    "General": ("gnn.GeneralConv(8, 8, attention=True)", "", False),
    "MF": ("gnn.MFConv(8, 8, max_degree=3)", "", False),
}  # fmt: skip

# name: (how it is made, whether it sees one row at a time)
NORMS: dict[str, tuple[str, bool]] = {
    "none": ("nn.Identity()", True),
    "layer": ("nn.LayerNorm(8)", True),
    "layer by node": ("gnn.LayerNorm(8, mode='node')", True),
    "layer by graph": ("gnn.LayerNorm(8)", False),
    "batch": ("gnn.BatchNorm(8)", False),
    "torch batch": ("nn.BatchNorm1d(8)", False),
    "graph": ("gnn.GraphNorm(8)", False),
    "pair": ("gnn.PairNorm()", False),
    "instance": ("gnn.InstanceNorm(8)", False),
    "mean": ("gnn.MeanSubtractionNorm()", False),
}

SKIPS = {
    "none": "x = ACT(NORM(h))",
    "residual": "x = x + ACT(NORM(h))",
    "pre": "x = x + h",
    "first": "x = ACT(NORM(h)) + 0.5 * x0",
}

BASIC = {
    "basic GCN": "gnn.models.GCN(5, 8, LAYERS, 3)",
    "basic GCN jk": "gnn.models.GCN(5, 8, LAYERS, 3, jk='cat', norm='LayerNorm')",
    "basic SAGE": "gnn.models.GraphSAGE(5, 8, LAYERS, 3, jk='max')",
    "basic GAT": "gnn.models.GAT(5, 8, LAYERS, 3, heads=2, v2=True)",
    "basic GIN": "gnn.models.GIN(5, 8, LAYERS, 3, norm='BatchNorm')",
}


@dataclass(frozen=True)
class NetDraw:
    """A network of 5 features, 8 channels and 3 classes.

    Attributes:
        layers: Names of `CONVS`; or so many times a name of `BASIC`.
        norm: Name of `NORMS`.
        skip: Name of `SKIPS`.
        jump: Of JumpingKnowledge; "" for none.
        act: A function of `torch`.
        is_loop: Whether forward loops over its layers, where all are alike.
        dropout: Between layers: plain runs draw other numbers.
    """

    layers: tuple[str, ...]
    norm: str = "none"
    skip: str = "none"
    jump: str = ""
    act: str = "torch.tanh"
    is_loop: bool = True
    dropout: float = 0.0

    @property
    def is_basic(self) -> bool:
        """Whether it is one of PyG's."""
        return self.layers[0] in BASIC

    @property
    def is_rowwise(self) -> bool:
        """Whether nodes see each other through messages alone that the oracle knows."""
        if self.is_basic:
            return self.layers[0] not in ("basic GIN", "basic GCN jk")  # with norms over all nodes
        return NORMS[self.norm][1] and all(CONVS[layer][2] for layer in self.layers)

    @property
    def made_by(self) -> str:
        """The expression that makes it."""
        if self.is_basic:
            return BASIC[self.layers[0]].replace("LAYERS", str(len(self.layers)))
        return "Net()"

    @property
    def has(self) -> frozenset[str]:
        """What habits may need."""
        found = {"net"} if self.is_basic else {"net", "own"}
        if not self.is_basic and all(layer.startswith("GCN") for layer in self.layers[:2]):
            found.add("tie")
        if len(set(self.layers)) == 1 and self.layers[0] in ("GCN", "SAGE", "GAT"):
            found.add("alike")
        return frozenset(found - ({"tie", "alike"} if self.layers[0] == "GCN2" else set()))


def draw_net(random: Random, graph: GraphDraw) -> NetDraw:
    """Return a network for this graph."""
    num_layers = random.randint(2, 6)
    if random.random() < 0.12:
        return NetDraw((random.choice(list(BASIC)),) * num_layers)
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
    if draw.is_basic:
        return []
    takes = {CONVS[layer][1] for layer in draw.layers}
    weights = ["edge_weight"] if "weight" in takes and graph.weights else []
    return [*weights, *(["edge_attr"] if "attr" in takes else [])]


def net_text(draw: NetDraw, graph: GraphDraw) -> str:
    """Return the class; PyG's own need none."""
    if draw.is_basic:
        return ""
    takes = {CONVS[layer][1] for layer in draw.layers}
    arguments = [*(["edge_weight=None"] if "weight" in takes and graph.weights else [])]
    arguments += ["edge_attr=None"] if "attr" in takes else []
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
        *_layer_lines(draw, "edge_weight=None" in arguments),
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

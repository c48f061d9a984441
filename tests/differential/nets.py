"""Small networks, drawn: kinds of layers, norms, skips, in a loop or one by one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_MLP = "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))"
_DEG = "torch.tensor([1, 3, 5, 4, 2, 1])"

# name: (how it is made, what it takes beside x and edge_index, whether the oracle knows it)
CONVS: dict[str, tuple[str, str, bool]] = {
    "GCN": ("gnn.GCNConv(8, 8)", "", True),
    "GCN weight": ("gnn.GCNConv(8, 8)", "edge_weight", True),
    "SAGE": ("gnn.SAGEConv(8, 8)", "", True),
    "SAGE max": ("gnn.SAGEConv(8, 8, aggr='max', project=True)", "", True),
    "GraphConv": ("gnn.GraphConv(8, 8, aggr='mean')", "edge_weight", True),
    "GAT": ("gnn.GATConv(8, 4, heads=2)", "", True),
    "GAT edges": ("gnn.GATConv(8, 4, heads=2, edge_dim=3)", "edge_attr", True),
    "GATv2": ("gnn.GATv2Conv(8, 4, heads=2)", "", True),
    "GIN": (f"gnn.GINConv({_MLP}, train_eps=True)", "", True),
    "GINE": (f"gnn.GINEConv({_MLP}, edge_dim=3)", "edge_attr", True),
    "Transformer": ("gnn.TransformerConv(8, 4, heads=2, beta=True)", "", True),
    "PNA": (f"gnn.PNAConv(8, 8, ['mean', 'max', 'sum'], ['identity', 'amplification'], {_DEG})",
            "", False),
    "GCN2": ("gnn.GCN2Conv(8, alpha=0.2)", "x0", True),
    "TAG": ("gnn.TAGConv(8, 8, K=2)", "edge_weight", True),
    "SG": ("gnn.SGConv(8, 8, K=2)", "", True),
    "APPNP": ("gnn.APPNP(K=2, alpha=0.1)", "edge_weight", True),
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
SKIPS = (
    "h = CALL(x)\n<<in_layer>>\nx = ACT(NORM(h))",
    "h = CALL(x)\n<<in_layer>>\nx = x + ACT(NORM(h))",
    "h = CALL(ACT(NORM(x)))\n<<in_layer>>\nx = x + h",
    "h = CALL(x)\n<<in_layer>>\nx = ACT(NORM(h)) + 0.5 * x0",
)


@dataclass(frozen=True)
class NetDraw:
    """A network of 5 features, 8 channels and 3 classes."""

    layers: tuple[str, ...]  # of `CONVS`
    norm: str = "none"
    skip: str = SKIPS[0]
    jump: str = ""  # of JumpingKnowledge
    act: str = "torch.tanh"
    dropout: float = 0.0  # between layers: plain runs draw other numbers

    @property
    def extra(self) -> list[str]:
        """What forward takes beside features and edges."""
        takes = {CONVS[layer][1] for layer in self.layers}
        return [name for name in ("edge_weight", "edge_attr") if name in takes]

    @property
    def is_rowwise(self) -> bool:
        """Whether nodes see each other through messages alone that the oracle knows."""
        return NORMS[self.norm][1] and all(CONVS[layer][2] for layer in self.layers)

    @property
    def has(self) -> set[str]:
        """What habits may need."""
        is_alike = self.layers[0] in ("GCN", "SAGE", "GAT") and len(set(self.layers)) == 1
        found = {"tie": self.layers[:2] == ("GCN", "GCN"), "alike": is_alike}
        found["edges alone"] = not self.extra
        return {name for name, is_there in found.items() if is_there}


def draw_net(random: Random) -> NetDraw:
    """Return any network."""
    num_layers, names = random.randint(2, 6), list(CONVS)
    if random.random() < 0.6:
        names = [random.choice(names)]
    return NetDraw(
        tuple(random.choices(names, k=num_layers)),
        random.choice(list(NORMS)) if random.random() < 0.6 else "none",
        random.choice(SKIPS),
        random.choice(["", "", "", "cat", "max", "lstm"]),
        random.choice(["torch.tanh", "torch.relu", "F.elu", "F.silu"]),
        random.choice([0.3, 0.5]) if random.random() < 0.1 else 0.0,
    )


_NET = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin_in = nn.Linear(5, 8)
        self.convs = nn.ModuleList([
            CONVS
        ])
        self.norms = nn.ModuleList(NORM for _ in self.convs)
        self.jump = JUMP
        self.lin_out = nn.Linear(WIDTH, 3)
        <<net_init>>

    def forward(self, PARAMETERS):
        <<forward_start>>
        x = x0 = self.lin_in(x)
        xs = []
        LAYERS
        x = LAST
        <<forward_end>>
        out = self.lin_out(x)
        <<out>>
        return out
"""


def net_text(draw: NetDraw) -> str:
    """Return the class; layers that are alike run in a loop."""
    deep, num_layers = " " * 8, len(draw.layers)
    if len(set(draw.layers)) == 1:
        lines = _one_layer(draw, draw.layers[0], "conv", "norm").replace("\n", "\n    ")
        lines = f"for conv, norm in zip(self.convs, self.norms, strict=True):\n    {lines}"
    else:
        places = enumerate(draw.layers)
        each = [_one_layer(draw, one, f"self.convs[{i}]", f"self.norms[{i}]") for i, one in places]
        lines = "\n".join(each)
    values = {
        "CONVS": f",\n{deep}    ".join(CONVS[layer][0] for layer in draw.layers),
        "NORM": NORMS[draw.norm][0],
        "JUMP": f"gnn.JumpingKnowledge('{draw.jump}', 8, {num_layers})" if draw.jump else "None",
        "WIDTH": str(8 * num_layers if draw.jump == "cat" else 8),
        "PARAMETERS": ", ".join(["x", "edge_index", *draw.extra]),
        "LAYERS": lines.replace("\n", f"\n{deep}"),
        "LAST": "self.jump(xs)" if draw.jump else "x",
    }
    text = _NET
    for name, value in values.items():
        text = text.replace(name, value, 1)
    return text


def _one_layer(draw: NetDraw, layer: str, conv: str, norm: str) -> str:
    takes = CONVS[layer][1]
    behind = f", {'x0, ' * (takes == 'x0')}edge_index{f', {takes}' * takes.startswith('edge')})"
    text = draw.skip.replace("ACT", draw.act).replace("NORM", norm)
    call, rest = text.split("\n", 1)
    call = call.removesuffix(")").replace("CALL", conv) + behind
    drop = f"\nx = F.dropout(x, {draw.dropout}, self.training)" if draw.dropout else ""
    return f"{call}\n{rest}{drop}\nxs.append(x)"

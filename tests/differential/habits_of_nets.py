"""What users do with a network: its inputs, what forward reads, copies; a few lines each."""

from __future__ import annotations

from tests.differential.program import Habit

OWN = frozenset({"own"})


def epoch_start(lines: str, after: int = 1) -> str:
    """Return a hook that runs `lines` from epoch `after` on."""
    body = "\n".join(f"        {line}" for line in lines.splitlines())
    return f"""
def on_train_epoch_start(self):
    if self.current_epoch >= {after}:
{body}
"""


def toggled(name: str, init: str, change: str, use: str, *, oracle: bool = False) -> Habit:
    """Return a habit: forward reads something that changes after the first epoch."""
    return Habit(
        name,
        {"net_init": init, "in_layer": use, "methods": epoch_start(change)},
        oracle=oracle,
        needs=OWN,
        group="epoch_start",
    )


# Inputs of a step that differ from those of the step before.
INPUTS = [
    Habit("new features each step", {"step_start": "x = x + 0.1 * (x + self.global_step).sin()"}),
    Habit("noise from torch", {"step_start": "x = x + 0.1 * torch.randn_like(x)"}),
    Habit("features scaled in place", {"step_start": "x.mul_(0.9)"}),
    Habit("features scaled by .data", {"step_start": "x.data.mul_(0.9)"}),
    Habit("features replaced", {"step_start": "data.x = x = x.detach() * 0.95"}),
    Habit("copies of equal features", {"step_start": "x = x.clone()"}),
    Habit(
        "known labels as features",
        {
            "step_start": "known = (torch.arange(x.size(0)) + self.global_step) % 2 == 0\n"
            "x = torch.cat([x[:, :2], F.one_hot(data.y, 3) * known[:, None]], 1)"
        },
    ),
    Habit(
        "two views in turn",
        {"step_start": "x = x if self.global_step % 2 == 0 else x.flip(1)"},
    ),
    Habit(
        "edges dropped each step",
        {"step_start": "edge_index = edge_index[:, torch.arange(edge_index.size(1)) % 3 != "
                       "self.global_step % 3]"},
        oracle=False,
        needs=frozenset({"edges alone"}),
    ),
    Habit(
        "snapshots on one graph",
        {"loaders": "shots = [graph, *(graph.clone() for _ in range(2))]\n"
                    "for number, shot in enumerate(shots):\n"
                    "    shot.x = shot.x + number\n"
                    "train = DataLoader(shots, batch_size=None)"},
        group="loader",
    ),
    Habit(
        "two graphs",
        {"loaders": "train = DataLoader([graph, make_graph(1)], batch_size=None)"},
        oracle=False,
        group="loader",
    ),
    Habit("validation on another graph",
          {"loaders": "val = DataLoader([make_graph(1)], batch_size=None)"}),
    Habit("PyG's loader",
          {"loaders": "from torch_geometric.loader import DataLoader as GraphLoader\n"
                      "train = GraphLoader([graph], batch_size=1)"}, group="loader"),
    Habit("batch of zeros",
          {"loaders": "graph.batch = torch.zeros(graph.num_nodes, dtype=torch.long)"}),
    Habit("no test mask",
          {"loaders": "del graph.test_mask\ntrain = FullGraphDataModule(graph)\nval = None"},
          group="loader"),
    Habit("data module", {"loaders": "train = FullGraphDataModule(graph)\nval = None"},
          group="loader"),
    Habit("random walk of y", {"step_start": "data.y = data.y.roll(self.global_step)"}),
]  # fmt: skip

# What forward reads beside its arguments.
READS = [
    toggled("flag", "self.flag = False", "self.net.flag = True", "h = 2 * h if self.flag else h"),
    toggled("_flag", "self._flag = False", "self.net._flag = True",
            "h = 2 * h if self._flag else h"),
    toggled("number", "self.factor = 1.0", "self.net.factor = 0.5", "h = h * self.factor"),
    toggled("_number", "self._factor = 1.0", "self.net._factor *= 0.5", "h = h * self._factor"),
    toggled("list", "self.factors = [1.0]", "self.net.factors[0] = 0.5", "h = h * self.factors[0]"),
    toggled("dict", "self.cfg = {'factor': 1.0}", "self.net.cfg['factor'] = 0.5",
            "h = h * self.cfg['factor']"),
    toggled("_dict", "self._cfg = {'factor': 1.0}", "self.net._cfg['factor'] = 0.5",
            "h = h * self._cfg['factor']"),
    toggled("object", "from types import SimpleNamespace\nself.hp = SimpleNamespace(factor=1.0)",
            "self.net.hp.factor = 0.5", "h = h * self.hp.factor"),
    toggled("class attribute", "type(self).factor = 1.0", "Net.factor = 0.5",
            "h = h * getattr(Net, 'factor', 1.0)"),
    toggled("closure", "factor = [1.0]\nself.scale = lambda h: h * factor[0]\nself.factor = factor",
            "self.net.factor[0] = 0.5", "h = self.scale(h)"),
    toggled("function", "self.act = torch.tanh", "self.net.act = torch.sigmoid", "h = self.act(h)"),
    toggled("module replaced", "self.act = nn.Tanh()", "self.net.act = nn.Sigmoid()",
            "h = self.act(h)"),
    toggled("tensor", "self.gain = torch.ones(1)", "self.net.gain *= 0.5", "h = h * self.gain"),
    toggled("_tensor", "self._gain = torch.ones(1)", "self.net._gain = torch.full((1,), 0.5)",
            "h = h * self._gain", oracle=True),
    toggled("buffer in place", "self.register_buffer('gain', torch.ones(8))",
            "self.net.gain.mul_(0.5)", "h = h * self.gain", oracle=True),
    toggled("buffer filled by data", "self.register_buffer('gain', torch.ones(8))",
            "self.net.gain.data.fill_(0.5)", "h = h * self.gain", oracle=True),
    toggled("buffer replaced", "self.register_buffer('gain', torch.ones(8))",
            "self.net.gain = torch.full((8,), 0.5)", "h = h * self.gain", oracle=True),
    toggled("dropout module all or nothing", "self.drop = nn.Dropout(0.0)",
            "self.net.drop.p = 1.0", "h = h + self.drop(h)"),
    toggled("dropout number all or nothing", "self.p = 0.0", "self.net.p = 1.0",
            "h = h + F.dropout(h, self.p, self.training)"),
    toggled("a part in eval", "self.drop = nn.Dropout(1.0)", "self.net.drop.eval()",
            "h = h + self.drop(h)"),
    toggled("slope", "self.act = nn.LeakyReLU(0.1)", "self.net.act.negative_slope = 0.4",
            "h = self.act(h)"),
    Habit("global",
          {"header": "SCALE = 1.0", "in_layer": "h = h * SCALE",
           "methods": epoch_start("global SCALE\nSCALE = 0.5")},
          oracle=False, needs=OWN, group="epoch_start"),
    Habit("counts its calls",
          {"net_init": "self.calls = 0", "forward_start": "self.calls += 1",
           "in_layer": "h = h / self.calls"}, oracle=False, needs=OWN),
    Habit("keeps a tensor",
          {"net_init": "self._h = None", "forward_end": "self._h = x",
           "step_out": "self.see('kept', self.net._h.detach().mean())"}, oracle=False, needs=OWN),
    Habit("loss of a kept tensor",
          {"net_init": "self.kept = None", "forward_end": "self.kept = x",
           "loss": "loss = loss + self.net.kept.pow(2).mean()"}, oracle=False, needs=OWN),
    Habit("reads training",
          {"in_layer": "h = 2 * h if self.training else h"}, needs=OWN),
    Habit("caches by id",
          {"net_init": "self._cache = {}",
           "forward_start": "x = self._cache.setdefault(tuple(x.shape), x)"},
          oracle=False, needs=OWN),
    Habit("running mean of its own",
          {"net_init": "self.register_buffer('mean', torch.zeros(8))",
           "forward_end": "if self.training:\n"
                          "    self.mean.mul_(0.9).add_(x.detach()[:, :8].mean(0), alpha=0.1)\n"
                          "x = x - self.mean.repeat(x.size(1) // 8)"}, oracle=False, needs=OWN),
]  # fmt: skip

# Modes and weights that a hook changes.
HOOKS = [
    Habit(f"{name} after an epoch", {"methods": epoch_start(lines)}, oracle=oracle,
          group="epoch_start", needs=frozenset({needs} if needs else ()))
    for name, lines, oracle, needs in [
        ("net in eval", "self.net.eval()", False, ""),
        ("frozen layer", "self.net.convs[0].requires_grad_(False)", True, "net"),
        ("frozen net", "self.net.lin_out.requires_grad_(True)\n"
                       "self.net.convs.requires_grad_(False)", True, "own"),
        ("norms in eval", "for norm in self.net.norms:\n    norm.eval()", False, "own"),
        ("another slope of attention", "for conv in self.net.convs:\n"
                                       "    conv.negative_slope = 0.5", False, "net"),
        ("weights decayed by hand",
         "with torch.no_grad():\n    for p in self.net.parameters():\n        p.mul_(0.9)",
         True, ""),
        ("weights clamped by data", "for p in self.parameters():\n    p.data.clamp_(-0.2, 0.2)",
         True, ""),
        ("last layer set", "nn.init.constant_(self.net.lin_out.weight, 0.1)", True, "own"),
        ("forward without gradients",
         "with torch.no_grad():\n"
         "    data = make_graph(1)\n    x, edge_index = data.x, data.edge_index\n"
         "    self.see('early', self.net(ARGUMENTS).mean())", True, "plain out"),
        ("another rate", "for group in self.trainer.optimizers[0].param_groups:\n"
                         "    group['lr'] = 0.01", True, ""),
        ("loaded weights", "if self.current_epoch == 1:\n"
                           "    self.before = copy.deepcopy(self.state_dict())\n"
                           "else:\n    self.load_state_dict(self.before)", False, ""),
    ]
]  # fmt: skip

_EMA = """
def on_fit_start(self):
    self.copies = [MAKE]

def on_train_batch_end(self, *args):
    with torch.no_grad():
        for old, new in zip(self.copies[0].parameters(), self.net.parameters(), strict=True):
            old.mul_(0.5).add_(new, alpha=0.5)
"""
_LOG_COPY = "self.log('copy', self.copies[0](ARGUMENTS).pow(2).mean(), batch_size=1)"

# Copies of the network, and second owners of its parts.
COPIES = [
    Habit("average by deepcopy",
          {"methods": _EMA.replace("MAKE", "copy.deepcopy(self.net)"),
           "validation": "if hasattr(self, 'copies'):\n    " + _LOG_COPY},
          oracle=False, group="copies", needs=frozenset({"plain out"})),
    Habit("copy of zeros while training",
          {"step_end": "with torch.no_grad():\n    zero = copy.deepcopy(self.net)\n"
                       "    for p in zero.parameters():\n        p.zero_()\n"
                       "    self.see('zero', zero(ARGUMENTS).mean())"},
          oracle=False, needs=frozenset({"plain out"})),
    Habit("copy by pickle",
          {"step_end": "twin = pickle.loads(pickle.dumps(self.net))\n"
                       "self.see('twin', sum(p.sum() for p in twin.parameters()))"},
          oracle=False),
    Habit("net saved whole",
          {"step_end": "file = io.BytesIO()\ntorch.save(self.net, file)\nfile.seek(0)\n"
                       "twin = torch.load(file, weights_only=False)\nwith torch.no_grad():\n"
                       "    self.see('twin', twin.eval()(ARGUMENTS).mean())"},
          oracle=False, needs=frozenset({"plain out"})),
    Habit("teacher",
          {"init": "self.teacher = copy.deepcopy(self.net).requires_grad_(False)",
           "step_out": "with torch.no_grad():\n    target = self.teacher.eval()(ARGUMENTS)\n"
                       "out = out + 0 * target",
           "loss": "loss = loss + F.mse_loss(out, target)"},
          oracle=False, needs=frozenset({"plain out"})),
    Habit("averaged model",
          {"methods": "def on_fit_start(self):\n"
                      "    self.averaged = [torch.optim.swa_utils.AveragedModel(self.net)]\n\n"
                      "def on_train_epoch_end(self):\n"
                      "    self.averaged[0].update_parameters(self.net)\n"
                      "    with torch.no_grad():\n"
                      "        data = make_graph()\n"
                      "        x, edge_index = data.x, data.edge_index\n"
                      "        self.see('averaged', self.averaged[0](ARGUMENTS).mean())"},
          oracle=False, group="copies", needs=frozenset({"plain out"})),
    Habit("alias of the layers", {"init": "self.backbone = self.net.convs"}),
    Habit("alias of a layer", {"init": "self.first = self.net.convs[0]"}),
    Habit("alias in a list", {"init": "self.parts = [self.net.convs, self.net]"}),
    Habit("head tied outside",
          {"init": "self.head = nn.Linear(8, 3)\n"
                   "self.head.weight = self.net.lin_out.weight",
           "loss": "ones = torch.ones(1, self.head.weight.size(1))\n"
                   "loss = loss + self.head(ones).pow(2).mean()"},
          needs=OWN),
    Habit("layers tied inside",
          {"net_init": "self.convs[1].lin.weight = self.convs[0].lin.weight"},
          needs=frozenset({"tie"})),
    Habit("a layer used twice", {"net_init": "self.convs[1] = self.convs[0]"}, oracle=False,
          needs=frozenset({"alike"})),
    Habit("norm used by all layers",
          {"net_init": "self.norms = nn.ModuleList([nn.LayerNorm(8)] * len(self.convs))"},
          needs=OWN),
    Habit("state_dict read", {"step_end": "self.see('state', "
                              "sum(v.double().pow(2).sum() for v in self.state_dict().values()))"}),
]  # fmt: skip

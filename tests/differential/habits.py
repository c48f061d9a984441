"""What users do with networks and in training, a few lines each; a draw has some of them."""

from __future__ import annotations

from random import Random

from tests.differential.nets import NetDraw, draw_net
from tests.differential.program import Draw, Habit

PLAIN = frozenset({"plain out"})


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
    slots = {"net_init": init, "in_layer": use, "methods": epoch_start(change)}
    return Habit(name, slots, oracle=oracle, group="epoch_start")


# Inputs of a step that differ from those of the step before.
INPUTS = [
    Habit("new features each step", {"step_start": "x = x + 0.1 * (x + self.global_step).sin()"}),
    Habit("noise from torch", {"step_start": "x = x + 0.1 * torch.randn_like(x)"}),
    Habit("features scaled in place", {"step_start": "x.mul_(0.9)"}),
    Habit("known labels as features",
          {"step_start": "known = (torch.arange(x.size(0)) + self.global_step) % 2 == 0\n"
                         "x = torch.cat([x[:, :2], F.one_hot(data.y, 3) * known[:, None]], 1)"}),
    Habit("two views in turn", {"step_start": "x = x if self.global_step % 2 == 0 else x.flip(1)"}),
    Habit("edges dropped each step",
          {"step_start": "edge_index = edge_index[:, torch.arange(edge_index.size(1)) % 3 != "
                         "self.global_step % 3]"},
          oracle=False, needs=frozenset({"edges alone"})),
    Habit("validation on another graph",
          {"loaders": "val = DataLoader([make_graph(1)], batch_size=None)"}),
]  # fmt: skip

# What forward reads beside its arguments.
READS = [
    toggled("flag", "self.flag = False", "self.net.flag = True", "h = 2 * h if self.flag else h"),
    toggled("_number", "self._factor = 1.0", "self.net._factor *= 0.5", "h = h * self._factor"),
    toggled("_dict", "self._cfg = {'factor': 1.0}", "self.net._cfg['factor'] = 0.5",
            "h = h * self._cfg['factor']"),
    toggled("closure", "factor = [1.0]\nself.scale = lambda h: h * factor[0]\nself.factor = factor",
            "self.net.factor[0] = 0.5", "h = self.scale(h)"),
    toggled("module replaced", "self.act = nn.Tanh()", "self.net.act = nn.Sigmoid()",
            "h = self.act(h)"),
    toggled("buffer in place", "self.register_buffer('gain', torch.ones(8))",
            "self.net.gain.mul_(0.5)", "h = h * self.gain", oracle=True),
    toggled("dropout module all or nothing", "self.drop = nn.Dropout(0.0)",
            "self.net.drop.p = 1.0", "h = h + self.drop(h)"),
    toggled("a part in eval", "self.drop = nn.Dropout(1.0)", "self.net.drop.eval()",
            "h = h + self.drop(h)"),
    Habit("reads training",
          {"in_layer": "h = 2 * h if self.training else h"}),
]  # fmt: skip

# Modes and weights that a hook changes.
HOOKS = [
    Habit(f"{name} after an epoch", {"methods": epoch_start(lines)}, oracle=oracle,
          group="epoch_start", needs=frozenset({needs} if needs else ()))
    for name, lines, oracle, needs in [
        ("net in eval", "self.net.eval()", False, ""),
        ("frozen layer", "self.net.convs[0].requires_grad_(False)", True, ""),
        ("frozen net", "self.net.lin_out.requires_grad_(True)\n"
                       "self.net.convs.requires_grad_(False)", True, ""),
        ("norms in eval", "for norm in self.net.norms:\n    norm.eval()", False, ""),
        ("another slope of attention", "for conv in self.net.convs:\n"
                                       "    conv.negative_slope = 0.5", False, ""),
        ("weights decayed by hand",
         "with torch.no_grad():\n    for p in self.net.parameters():\n        p.mul_(0.9)",
         True, ""),
        ("forward without gradients",
         "with torch.no_grad():\n"
         "    data = make_graph(1)\n    x, edge_index = data.x, data.edge_index\n"
         "    self.see('early', self.net(ARGUMENTS).mean())", True, "plain out"),
    ]
]  # fmt: skip

# Copies of the network, and second owners of its parts.
COPIES = [
    Habit("teacher",
          {"init": "self.teacher = copy.deepcopy(self.net).requires_grad_(False)",
           "step_out": "with torch.no_grad():\n    target = self.teacher.eval()(ARGUMENTS)\n"
                       "out = out + 0 * target",
           "loss": "loss = loss + F.mse_loss(out, target)"},
          oracle=False, needs=PLAIN),
    Habit("head tied outside",
          {"init": "self.head = nn.Linear(8, 3)\n"
                   "self.head.weight = self.net.lin_out.weight",
           "loss": "ones = torch.ones(1, self.head.weight.size(1))\n"
                   "loss = loss + self.head(ones).pow(2).mean()"}),
    Habit("layers tied inside",
          {"net_init": "self.convs[1].lin.weight = self.convs[0].lin.weight"},
          needs=frozenset({"tie"})),
    Habit("a layer used twice", {"net_init": "self.convs[1] = self.convs[0]"}, oracle=False,
          needs=frozenset({"alike"})),
    Habit("norm used by all layers",
          {"net_init": "self.norms = nn.ModuleList([nn.LayerNorm(8)] * len(self.convs))"}),
]  # fmt: skip


def returning(name: str, out: str, step_out: str, *, oracle: bool = False) -> Habit:
    """Return a habit: forward returns something else, `out` is made of it."""
    return Habit(name, {"out": out, "step_out": step_out}, oracle=oracle, group="output")


# Outputs of forward, and what is done with them.
OUTPUTS = [
    returning("complex", "out = torch.complex(out, 2 * out.sin())", "out = out.real + out.imag"),
    returning("two outputs", "out = out, x", "out, h = out\nout = out + h.mean(1, keepdim=True)"),
    returning("dictionary", "out = {'out': out, 'first': x0}",
              "out = out['out'] + out['first'][:, :3]"),
    returning("log-softmax twice", "out = out.log_softmax(1) * 1.0", "out = out.exp()",
              oracle=True),
    Habit("some rows only", {"loss": "loss = loss + out[:2].pow(2).sum()"}),
    Habit("changed in place", {"step_out": "out += 1"}),
    Habit("gradients of outputs", {"step_end": "grad, = torch.autograd.grad(loss, out, "
                                   "retain_graph=True)\nself.see('grad', grad.norm())"}),
    Habit("learned features",
          {"init": "self.table = nn.Parameter(torch.ones(1, 5))",
           "step_start": "x = x * self.table"}),
]  # fmt: skip


# Hooks of torch.
TORCH_HOOKS = [
    Habit("hook of the output", {"step_out": "if out.requires_grad:\n"
                                 "    out.register_hook(lambda g: self.see('out', g.norm()))"}),
    Habit("hook that changes", {"step_out": "if out.requires_grad:\n"
                                "    out.register_hook(lambda g: 0.5 * g)"}),
]  # fmt: skip

# Values of all weights or gradients.
WHOLE = [
    Habit("own clipping by torch",
          {"methods": "def configure_gradient_clipping(self, optimizer, *args, **kwargs):\n"
                      "    self.see('clip', nn.utils.clip_grad_norm_(self.parameters(), 0.1))"},
          group="clip"),
    Habit("weight penalty",
          {"loss": "loss = loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters())"}),
]  # fmt: skip

_MANUAL = """
optimizer = self.optimizers()
optimizer.zero_grad()
self.manual_backward(loss)
optimizer.step()
"""


def optimized(name: str, body: str) -> Habit:
    """Return a habit: another optimizer."""
    return Habit(name, optimizer=body, group="optimizer")


# Lightning's settings.
SETTINGS = [
    Habit("manual optimization",
          {"init": "self.automatic_optimization = False", "step_end": _MANUAL}, group="clip"),
    Habit("accumulated",
          {"loaders": "train = DataLoader([graph, graph], batch_size=None)"},
          trainer="accumulate_grad_batches=2", group="loader", oracle=False),
    Habit("second pass without gradients",
          {"step_end": "with torch.no_grad():\n"
                       "    self.see('again', self.net(ARGUMENTS).mean())"},
          needs=PLAIN, oracle=False),
    Habit("net in eval for a pass",
          {"step_end": "self.net.eval()\nwith torch.no_grad():\n"
                       "    self.log('again', self.net(ARGUMENTS).mean())\nself.net.train()"},
          needs=PLAIN, oracle=False),
    optimized("two groups",
              "last = list(self.net.lin_out.parameters())\n"
              "return torch.optim.SGD([{'params': last, 'lr': 0.2}, {'params': "
              "list(self.net.convs.parameters()) + [nn.Parameter(torch.ones(1))]}], lr=0.1)"),
    optimized("some weights", "return torch.optim.SGD(self.net.lin_out.parameters(), lr=0.1)"),
    Habit("evaluated before",
          {"loaders": "trainer.validate(module, val or train, verbose=False)\n"
                      "module.seen.clear()\n"
                      "L.seed_everything(7, verbose=False)"}, oracle=False),
    Habit("skips an epoch", {"methods": "def on_train_batch_start(self, batch, batch_idx):\n"
                             "    return -1 if self.current_epoch == 1 else None"}, oracle=False),
]  # fmt: skip

KINDS = (INPUTS, READS, HOOKS, COPIES, OUTPUTS, TORCH_HOOKS, WHOLE, SETTINGS)
HABITS = tuple(habit for kind in KINDS for habit in kind)


def draw_of(seed: int) -> Draw:
    """Return the draw of a seed.

    Habits go by turns, so that each comes once in as many draws as there are, whatever the
    others are.
    """
    random = Random(seed)
    num_nodes, net, first = random.randint(8, 24), draw_net(random), HABITS[seed % len(HABITS)]
    while not _fits(net, (first,)):
        net = draw_net(random)
    habits = (first,)
    for _ in range(random.choice([0, 1, 2, 3])):
        more = (*habits, random.choice(random.choice(KINDS)))
        if _fits(net, more):
            habits = more
    return Draw(seed, net, num_nodes, habits)


def _fits(net: NetDraw, habits: tuple[Habit, ...]) -> bool:
    """Whether these habits go together, and with the network."""
    groups = [habit.group for habit in habits if habit.group]
    names = [habit.name for habit in habits]
    has = net.has if "output" in groups else {*net.has, "plain out"}
    is_alone = len(groups) == len(set(groups)) and len(names) == len(set(names))
    return is_alone and all(habit.needs <= has for habit in habits)

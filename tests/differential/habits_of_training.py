"""What users do in training: with outputs, gradients, values, and Lightning's own settings."""

from __future__ import annotations

from tests.differential.program import Habit

OWN = frozenset({"own"})
PLAIN = frozenset({"plain out"})


def returning(name: str, out: str, step_out: str, *, oracle: bool = False) -> Habit:
    """Return a habit: forward returns something else, `out` is made of it."""
    return Habit(name, {"out": out, "step_out": step_out}, oracle=oracle, needs=OWN, group="output")


# Outputs of forward, and what is done with them.
OUTPUTS = [
    returning("complex", "out = torch.complex(out, 2 * out.sin())", "out = out.real + out.imag"),
    returning("complex and real", "out = torch.complex(out, out.sin()), out",
              "out = out[0].abs() + out[1]"),
    returning("two outputs", "out = out, x", "out, h = out\nout = out + h.mean(1, keepdim=True)"),
    returning("second output unused", "out = out, x", "out, _ = out"),
    returning("first output detached", "out = out, 2 * out", "out = out[0].detach() + out[1]"),
    returning("dictionary", "out = {'out': out, 'first': x0}",
              "out = out['out'] + out['first'][:, :3]"),
    returning("classes as well", "out = out, out.argmax(1)",
              "out, found = out\nself.see('found', found.double().mean())"),
    returning("inputs returned", "out = out, x0", "out = out[0] + out[1][:, :3]"),
    returning("log-softmax twice", "out = out.log_softmax(1) * 1.0", "out = out.exp()",
              oracle=True),
    returning("mean over nodes", "out = out, x.mean(0)", "out = out[0] + out[1].mean()"),
    Habit("used twice", {"loss": "loss = loss + out.pow(2).mean() + out.detach().mean()"}),
    Habit("some rows only", {"loss": "loss = loss + out[:2].pow(2).sum()"}),
    Habit("changed in place", {"step_out": "out += 1"}),
    Habit("rows set in place", {"step_out": "out[:2] = 0.0"}),
    Habit("gradients of outputs", {"step_end": "grad, = torch.autograd.grad(loss, out, "
                                   "retain_graph=True)\nself.see('grad', grad.norm())"}),
    Habit("gradient kept", {"step_out": "if out.requires_grad:\n    out.retain_grad()\n"
                            "    self.kept = [out]", "methods": "def on_after_backward(self):\n"
                            "    self.see('kept', self.kept[0].grad.norm())"},
          group="after_backward"),
    Habit("loss without the net in a step",
          {"step_end": "if self.global_step == 1:\n    return None"}, oracle=False),
    Habit("saliency",
          {"step_start": "x = x.clone().requires_grad_()\nself.x = [x]",
           "methods": "def on_after_backward(self):\n    self.see('x', self.x[0].grad.norm())"},
          group="after_backward"),
    Habit("learned features",
          {"init": "self.table = nn.Parameter(torch.ones(1, 5))",
           "step_start": "x = x * self.table"}),
    Habit("learned embedding outside",
          {"init": "self.table = nn.Embedding(64, 5)",
           "step_start": "x = x + self.table(torch.arange(x.size(0)))"}),
    Habit("sparse embedding outside",
          {"init": "self.table = nn.Embedding(64, 5, sparse=True)",
           "step_start": "x = x + self.table(torch.arange(x.size(0)))"}, group="sparse"),
    Habit("embedding inside",
          {"net_init": "self.table = nn.Embedding(64, 8)",
           "in_layer": "h = h + self.table(x0[:, 0].detach().abs().mul(9).long().clamp(max=63))"},
          needs=OWN),
    Habit("sparse embedding inside",
          {"net_init": "self.table = nn.Embedding(64, 8, sparse=True)",
           "in_layer": "h = h + self.table(x0[:, 0].detach().abs().mul(9).long().clamp(max=63))"},
          needs=OWN, group="sparse"),
    Habit("a weight a node",
          {"net_init": "self.gain = nn.Parameter(torch.rand(NODES, 1) + 0.5)",
           "in_layer": "h = h * self.gain"}, needs=OWN),
]  # fmt: skip


def hooked(name: str, init: str, *, needs: frozenset[str] = frozenset()) -> Habit:
    """Return a habit: a hook is registered at the start."""
    return Habit(name, {"init": init}, oracle=False, needs=needs)


_SEE = "lambda *a: self.see('hook', a[-1].detach().norm())"
_SEE_GRAD = "lambda m, gi, go: self.see('hook', go[0].norm())"

# Hooks of torch.
TORCH_HOOKS = [
    Habit("hook of the output", {"step_out": "if out.requires_grad:\n"
                                 "    out.register_hook(lambda g: self.see('out', g.norm()))"}),
    Habit("hook that changes", {"step_out": "if out.requires_grad:\n"
                                "    out.register_hook(lambda g: 0.5 * g)"}),
    hooked("forward hook of the net", f"self.net.register_forward_hook({_SEE})", needs=PLAIN),
    hooked("forward hook that changes", "self.net.register_forward_hook(lambda m, a, o: 2 * o)",
           needs=PLAIN),
    hooked("pre-hook of the net",
           "self.net.register_forward_pre_hook(lambda m, a: (2 * a[0], *a[1:]))"),
    hooked("backward hook of the net", f"self.net.register_full_backward_hook({_SEE_GRAD})",
           needs=PLAIN),
    hooked("forward hook of a layer", f"self.net.convs[0].register_forward_hook({_SEE})"),
    hooked("forward hook of a linear layer", f"self.net.lin_out.register_forward_hook({_SEE})",
           needs=OWN),
    hooked("hook of a layer that changes",
           "self.net.convs[0].register_forward_hook(lambda m, a, o: 2 * o)"),
    hooked("pre-hook of a layer",
           "self.net.convs[1].register_forward_pre_hook(lambda m, a: (2 * a[0], *a[1:]))"),
    hooked("backward hook of a layer",
           f"self.net.convs[1].register_full_backward_hook({_SEE_GRAD})"),
    hooked("hook of a weight",
           "next(self.net.parameters()).register_hook(lambda g: self.see('hook', g.norm()))"),
    hooked("hook of weights that changes",
           "for p in self.net.parameters():\n    p.register_hook(lambda g: 0.5 * g)"),
    hooked("hook after accumulation",
           "for p in list(self.net.parameters())[:1]:\n"
           "    p.register_post_accumulate_grad_hook(lambda p: self.see('hook', p.grad.norm()))"),
]  # fmt: skip

_NORM = "torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()"

# Values of all weights or gradients.
WHOLE = [
    Habit("norm logged", {"methods": "def on_before_optimizer_step(self, optimizer):\n"
                          "    from lightning.pytorch.utilities import grad_norm\n"
                          "    self.log_dict(grad_norm(self, 2))"}, group="before_step"),
    Habit("norm by hand", {"methods": "def on_before_optimizer_step(self, optimizer):\n"
                           f"    self.log('norm', {_NORM})"}, group="before_step"),
    Habit("norm seen after backward",
          {"methods": f"def on_after_backward(self):\n    self.see('norm', {_NORM})"},
          group="after_backward"),
    Habit("own clipping by torch",
          {"methods": "def configure_gradient_clipping(self, optimizer, *args, **kwargs):\n"
                      "    self.see('clip', nn.utils.clip_grad_norm_(self.parameters(), 0.1))"},
          group="clip"),
    Habit("own clipping by hand",
          {"methods": "def configure_gradient_clipping(self, optimizer, *args, **kwargs):\n"
                      f"    norm = {_NORM}\n"
                      "    for p in self.parameters():\n"
                      "        if p.grad is not None:\n"
                      "            p.grad.mul_(0.1 / norm)"}, group="clip"),
    Habit("clipped by norm", trainer="gradient_clip_val=0.05", group="clip"),
    Habit("clipped by value",
          trainer="gradient_clip_val=0.01, gradient_clip_algorithm='value'", group="clip"),
    Habit("weight penalty",
          {"loss": "loss = loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters())"}),
    Habit("penalty of one layer",
          {"loss": "loss = loss + 0.1 * self.net.lin_out.weight.abs().sum()"}, needs=OWN),
    Habit("all weights in a vector",
          {"step_end": "self.see('vector', "
                       "nn.utils.parameters_to_vector(self.net.parameters()).norm())"}),
    Habit("histogram", {"step_end": "self.see('histogram', torch.stack([torch.histc(p.detach(), 4) "
                                    "for p in self.net.parameters()]))"}),
    Habit("number of weights",
          {"step_end": "self.see('number', sum(p.numel() for p in self.parameters()))"}),
    Habit("largest weight", {"step_end": "self.see('largest', "
                             "max(p.detach().abs().max() for p in self.parameters()))"}),
]  # fmt: skip

_MANUAL = """
optimizer = self.optimizers()
optimizer.zero_grad()
self.manual_backward(loss)
optimizer.step()
"""
_METRICS = """
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
self.scores = MetricCollection({'a': MulticlassAccuracy(3), 'f': MulticlassF1Score(3)})
"""


def optimized(name: str, body: str, *, needs: frozenset[str] = frozenset()) -> Habit:
    """Return a habit: another optimizer."""
    return Habit(name, optimizer=body, group="optimizer", needs=needs)


def called_back(name: str, callbacks: str, trainer: str = "", *, oracle: bool = True) -> Habit:
    """Return a habit: callbacks of Lightning."""
    return Habit(name, callbacks=callbacks, trainer=trainer, oracle=oracle)


# Lightning's settings.
SETTINGS = [
    Habit("manual optimization",
          {"init": "self.automatic_optimization = False", "step_end": _MANUAL}, group="clip"),
    Habit("accumulated",
          {"loaders": "train = DataLoader([graph, graph], batch_size=None)"},
          trainer="accumulate_grad_batches=2", group="loader", oracle=False),
    Habit("two losses", {"loss": "loss = 0.5 * loss + F.mse_loss(out, torch.ones_like(out))"}),
    Habit("extra results", {"step_end": "return {'loss': loss, 'out': out.detach()}"}),
    Habit("second pass without gradients",
          {"step_end": "with torch.no_grad():\n"
                       "    self.see('again', self.net(ARGUMENTS).mean())"},
          needs=PLAIN, oracle=False),
    Habit("net in eval for a pass",
          {"step_end": "self.net.eval()\nwith torch.no_grad():\n"
                       "    self.log('again', self.net(ARGUMENTS).mean())\nself.net.train()"},
          needs=PLAIN, oracle=False),
    Habit("metrics", {"init": _METRICS,
                      "step_end": "self.scores(out.detach(), data.y)\n"
                                  "self.log_dict(self.scores, on_step=False, on_epoch=True)"}),
    Habit("logged by step and epoch",
          {"step_end": "self.log('both', loss, on_step=True, on_epoch=True, prog_bar=True)"}),
    optimized("adam", "return torch.optim.Adam(self.parameters(), lr=0.01)"),
    optimized("adamw", "return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)"),
    optimized("momentum", "return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)"),
    optimized("amsgrad", "return torch.optim.Adam(self.parameters(), lr=0.01, amsgrad=True)"),
    optimized("adadelta", "return torch.optim.Adadelta(self.parameters())"),
    optimized("two groups",
              "last = list(self.net.lin_out.parameters())\n"
              "return torch.optim.SGD([{'params': last, 'lr': 0.2}, {'params': "
              "list(self.net.convs.parameters()) + [nn.Parameter(torch.ones(1))]}], lr=0.1)",
              needs=OWN),
    optimized("some weights", "return torch.optim.SGD(self.net.lin_out.parameters(), lr=0.1)",
              needs=OWN),
    optimized("steps of the rate",
              "optimizer = torch.optim.SGD(self.parameters(), lr=0.1)\n"
              "return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]"),
    optimized("one cycle",
              "optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)\n"
              "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)\n"
              "return {'optimizer': optimizer, "
              "'lr_scheduler': {'scheduler': schedule, 'interval': 'step'}}"),
    optimized("plateau",
              "optimizer = torch.optim.SGD(self.parameters(), lr=0.1)\n"
              "schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n"
              "return {'optimizer': optimizer, "
              "'lr_scheduler': {'scheduler': schedule, 'monitor': 'train_loss'}}"),
    called_back("early stop",
                "L.pytorch.callbacks.EarlyStopping('train_loss', patience=1, mode='max')"),
    called_back("best checkpoint",
                "L.pytorch.callbacks.ModelCheckpoint(monitor='train_loss', save_last=True)",
                "enable_checkpointing=True"),
    called_back("stochastic averages",
                "L.pytorch.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, "
                "annealing_epochs=1)", oracle=False),
    called_back("averages by Lightning", "L.pytorch.callbacks.EMAWeightAveraging(decay=0.5)",
                oracle=False),
    called_back("timer", "L.pytorch.callbacks.Timer()"),
    called_back("accumulation by epoch",
                "L.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 1})"),
    called_back("anomalies", "", "detect_anomaly=True"),
    called_back("no validation", "", "limit_val_batches=0"),
    called_back("validation now and then", "", "check_val_every_n_epoch=2"),
    called_back("no sanity check", "", "num_sanity_val_steps=0"),
    Habit("evaluated afterwards",
          {"after_fit": "found['later'] = trainer.validate(module, val, verbose=False)"
                        "[0]['val_loss'] if val is not None else 0.0\n"
                        "found['later'] = torch.as_tensor(found['later'])"}, oracle=False),
    Habit("evaluated before",
          {"loaders": "trainer.validate(module, val or train, verbose=False)\n"
                      "module.seen.clear()\n"
                      "L.seed_everything(7, verbose=False)"}, oracle=False),
    Habit("steps at its own pace",
          {"methods": "def optimizer_step(self, epoch, batch_idx, optimizer, closure):\n"
                      "    optimizer.step(closure=closure)\n"
                      "    self.see('steps', epoch)"}),
    Habit("zeros kept", {"methods": "def optimizer_zero_grad(self, epoch, batch_idx, optimizer):\n"
                         "    optimizer.zero_grad(set_to_none=False)"}),
    Habit("hyperparameters", {"init": "self.hidden = 8\nself.save_hyperparameters()"}),
    Habit("skips an epoch", {"methods": "def on_train_batch_start(self, batch, batch_idx):\n"
                             "    return -1 if self.current_epoch == 1 else None"}, oracle=False),
]  # fmt: skip

"""Weights, gradients and buffers that users read in hooks: on stages as on one device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_gnnpipe.steps.weight_reads import WeightReads
from lightning_gnnpipe.trainer.refuse import check_optimizers
from tests.helpers.realistic import Realistic
from tests.helpers.trainers import assert_same, datamodule, make_trainer

pytestmark = pytest.mark.usefixtures("double")
EPOCHS = 3


def norm_of(tensors: Any) -> Tensor:
    return torch.stack([t.detach().square().sum() for t in tensors if t is not None]).sum()


class Scaled(Realistic):
    """Has a single number and running statistics in the layers as well.

    Args:
        hooks: By name, what is called with the module; what it returns is kept.
    """

    def __init__(self, hooks: dict[str, list[Callable[[Any], Any]]]) -> None:
        super().__init__()
        self.net = Net()
        self.hooks = hooks
        self.seen: list[Any] = []

    def look(self, hook: str) -> None:
        if not self.trainer.sanity_checking:
            self.seen += [copy.deepcopy(call(self)) for call in self.hooks.get(hook, ())]


def looking(hook: str) -> Callable[..., None]:
    return lambda self, *_: self.look(hook)


for name in ("after_backward", "before_optimizer_step", "train_batch_start", "train_batch_end"):
    setattr(Scaled, f"on_{name}", looking(f"on_{name}"))
for name in ("train_epoch_end", "validation_epoch_end", "train_end"):
    setattr(Scaled, f"on_{name}", looking(f"on_{name}"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv(8, 8, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.strength = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> dict[str, Any]:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edge_index)).relu()
        x = x * self.strength
        return {"h": x, "both": (x, x * 2)}


def fit(
    folder: Path, num_stages: int, module: Scaled, *callbacks: L.Callback, **kwargs: Any
) -> list[list[Any]]:
    """Return what each rank has seen."""
    folder.mkdir()
    kwargs.setdefault("logger", TensorBoardLogger(folder))

    def save(trainer: L.Trainer, module: Any) -> None:
        torch.save(module.seen, folder / f"{trainer.global_rank}.pt")

    trainer = make_trainer(
        num_stages, EPOCHS, *callbacks, LambdaCallback(on_fit_end=save), **kwargs
    )
    trainer.fit(module, datamodule=datamodule())
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("*.pt"))]


def clip_by_hand(module: Any) -> Tensor:
    found = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    torch.nn.utils.clip_grad_value_(module.parameters(), 0.02)
    return found


def halve(module: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.5)
        module.net.convs[0].lin_l.weight.data.clamp_(min=-0.1)


def restart(module: Any) -> None:
    if module.current_epoch == 1:
        module.load_state_dict({k: v * 0.9 for k, v in module.state_dict().items()})


def to_vector(module: Any) -> Tensor:
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, module.parameters())
    return vector.detach()


def draw(module: Any) -> None:
    """Only the first rank has a logger that does something."""
    for name, p in module.named_parameters():
        module.logger.experiment.add_histogram(name, p)
        module.logger.experiment.add_histogram(f"{name}.grad", p.grad)


def states_of(module: Any) -> Any:
    return module.optimizers().state_dict()["state"]


def moments(module: Any) -> list[Any]:
    states = module.trainer.optimizers[0].state
    found = {n: states[p]["exp_avg_sq"] for n, p in module.net.named_parameters()}
    weight = module.net.convs[2].lin_l.weight
    return [found, len(states), weight in states, bool(states.get(weight)), list(states.values())]


def as_mapping(module: Any) -> list[Any]:
    """Use the states as a dict is used, keys that are absent among them."""
    states, absent = module.trainer.optimizers[0].state, nn.Parameter(torch.zeros(1))
    found = [states.get(absent), states.pop(absent, 1), states.setdefault("own", 2)]
    found += ["own" in states]
    found += [len(states), len(states.copy()), len(copy.copy(states)), len(states | {3: 4})]
    states |= {"own": 5}
    assert states | states == dict(states)
    return [*found, states.pop("own"), states[absent], states.pop(absent), len(states)]


def each_rank_its_own(module: Any) -> Any:
    """The first rank reads weights, the second one states; afterwards both read the other."""
    if module.global_rank == 0:
        return norm_of(module.parameters()), states_of(module)
    states = states_of(module)
    return norm_of(module.parameters()), states


def load_states(module: Any) -> None:
    optimizer = module.trainer.optimizers[0]
    found = copy.deepcopy(optimizer).state_dict()
    for state in found["state"].values():
        state["exp_avg"] = state["exp_avg"] * 0.5
    optimizer.load_state_dict(found)


def copied_states(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module.trainer.optimizers[0].state_dict()))


READS: dict[str, dict[str, list[Callable[[Any], Any]]]] = {
    "read": {
        "on_after_backward": [
            lambda m: norm_of(p.grad for p in m.parameters()),
            lambda m: m.net.convs[2].lin_l.weight.grad.clone(),
            lambda m: m.net.norms[0].running_mean.clone(),
        ],
        "on_before_optimizer_step": [lambda m: grad_norm(m, norm_type=2)],
        "on_train_batch_end": [lambda m: norm_of(m.parameters()), lambda m: grad_norm(m.net, 1)],
        "on_train_epoch_end": [
            lambda m: m.state_dict(),
            lambda m: sum(p.numel() for p in m.parameters()),
            lambda m: [tuple(p.shape) for p in m.parameters()],
        ],
        "on_validation_epoch_end": [
            lambda m: norm_of(m.buffers()),
            lambda m: m.net.convs[2].lin_l.weight.norm().detach(),
            lambda m: dict(copy.deepcopy(m.net.convs).named_parameters()),
        ],
        "on_train_end": [lambda m: {n: p.data for n, p in m.net.named_parameters()}],
    },
    "read on one rank": {
        "on_after_backward": [rank_zero_only(lambda m: grad_norm(m, norm_type=2)), draw],
        "on_train_epoch_end": [rank_zero_only(lambda m: norm_of(m.parameters()))],
        "on_train_end": [rank_zero_only(lambda m: m.state_dict())],
    },
    "written": {
        "on_before_optimizer_step": [clip_by_hand],
        "on_train_batch_end": [halve],
        "on_train_epoch_end": [restart, to_vector],
    },
    "optimizer states": {
        "on_train_batch_start": [states_of, as_mapping],
        "on_before_optimizer_step": [states_of],
        "on_train_batch_end": [states_of, moments],
        "on_train_epoch_end": [each_rank_its_own],
        "on_validation_epoch_end": [lambda m: copy.deepcopy(m.trainer.optimizers[0]).state_dict()],
        "on_train_end": [copied_states],
    },
    "optimizer states on one rank": {"on_train_batch_end": [rank_zero_only(moments)]},
    "optimizer states written": {
        "on_train_batch_end": [load_states, states_of],
        "on_train_epoch_end": [states_of],
    },
}


def assert_seen(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, check_dtype=False)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", READS)
def test_what_a_hook_reads_is_whole(name: str, tmp_path: Path) -> None:
    assert_as_plain(Scaled(READS[name]), tmp_path)


def assert_as_plain(plain: Scaled, folder: Path, **kwargs: Any) -> None:
    ours = copy.deepcopy(plain)
    [expected] = fit(folder / "0", 0, plain, **kwargs)
    for found in fit(folder / "2", 2, ours, **kwargs):
        assert_seen(found, expected)
    assert_same(ours, plain)


class Penalized(Scaled):
    """Decays its weights by hand, before and after the call of the net, and keeps norms."""

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        before = sum(p.pow(2).sum() for p in self.net.parameters())
        loss = super().training_step(data, batch_idx)
        after = sum(p.abs().sum() for n, p in self.named_parameters() if "weight" in n)
        self.seen.append(norm_of(self.parameters()))
        return loss + 0.01 * before + 0.02 * after


class ByHand(Scaled):
    """Clips and steps by hand."""

    def __init__(self) -> None:
        super().__init__({})
        self.automatic_optimization = False

    def training_step(self, data: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.step(data, "train"))
        self.seen.append(nn.utils.clip_grad_norm_(self.net.parameters(), 0.1))
        optimizer.step()
        self.seen.append(norm_of(self.parameters()))


class Numbered(Net):
    """Begins with an embedding of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(70, 8, sparse=True)

    def forward(self, x: Tensor, edge_index: Tensor, number: Tensor) -> dict[str, Any]:
        return super().forward(self.embedding(number), edge_index, x)


class WithNumbers(Scaled):
    def __init__(self) -> None:
        hooks = [lambda m: grad_norm(m, 2), lambda m: m.net.embedding.weight.grad.to_dense()]
        super().__init__({"on_after_backward": hooks})
        self.net = Numbered()

    def forward(self, data: Any) -> Tensor:
        return self.head(self.net(data.x, data.edge_index, torch.arange(60) % 50)["h"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PenalizedBefore(Scaled):
    """Reads weights before the first forward of the run."""

    def training_step(self, data: Any, batch_idx: int) -> Any:
        penalty = sum(p.pow(2).sum() for p in self.net.parameters())
        loss = super().training_step(data, batch_idx) + 0.01 * penalty
        self.seen.append(penalty.detach().clone())
        return loss


NORM = {"on_after_backward": [lambda m: grad_norm(m, norm_type=2)]}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Penalized(NORM), {"accumulate_grad_batches": 2}),
        (lambda: PenalizedBefore({}), {"num_sanity_val_steps": 0}),
        (ByHand, {}),
        (WithNumbers, {}),
    ],
    ids=["penalties", "before the first forward", "manual optimization", "sparse gradients"],
)
def test_uses_of_all_weights(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    assert_as_plain(make(), tmp_path, **options)


class Everything(Scaled):
    """Uses what Lightning does with weights and gradients by itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=True)


def test_nothing_is_fetched_that_nobody_reads(monkeypatch: Any, tmp_path: Path) -> None:
    def refuse(self: WeightReads, asks: str) -> None:
        raise AssertionError(asks)

    monkeypatch.setattr(WeightReads, "_gather", refuse)
    callbacks = [EMAWeightAveraging(decay=0.7), ModelCheckpoint(tmp_path, save_last=True)]
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    fit(tmp_path / "2", 2, Everything({}), *callbacks, **options, accumulate_grad_batches=2)


class FillsGradients(torch.optim.Optimizer):
    """Makes a state for each parameter, and zeros where one has no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + grad
                p -= group["lr"] * state["mean"]
        return loss


class FillingGradients(Scaled):
    def configure_optimizers(self) -> Any:
        return FillsGradients(self.parameters(), {"lr": 0.01})


def test_optimizers_that_make_states_for_all_parameters(tmp_path: Path) -> None:
    hooks = {"on_train_batch_end": [states_of], "on_train_epoch_end": [states_of]}
    seen, states = [], []
    for num_stages in 0, 2:
        folder = tmp_path / f"saved{num_stages}"
        torch.manual_seed(0)
        keeps = ModelCheckpoint(folder, save_last=True)
        seen.append(fit(tmp_path / str(num_stages), num_stages, FillingGradients(hooks), keeps))
        saved = torch.load(folder / "last.ckpt", weights_only=False)
        states.append(saved["optimizer_states"][0]["state"])
    [expected], found = seen
    for one in found:
        assert_seen(one, expected)
    assert_seen(states[1:], states[:1])


def alone(module: Any) -> None:
    if module.global_rank == 0:
        with torch.no_grad():
            data = module.trainer.datamodule.data
            module.net(torch.zeros(60, 8), data.edge_index, data.edge_attr)


def gradients_of(module: Any) -> Any:
    loss = norm_of([module.head.weight])
    return torch.autograd.grad(loss, list(module.net.parameters()), allow_unused=True)


def fails_alone(module: Any) -> None:
    if module.global_rank == 1 and module.current_epoch == 1:
        raise KeyError("my own mistake")


class Notes(L.Callback):
    """Has a hook for errors, which must not take the place of this one."""

    def on_exception(self, *_: Any) -> None:
        pass


ALONE = r"all ranks to make the same calls \(got rank 0 wants to evaluate.*on_train_epoch_end"


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("hook", "use", "message"),
    [
        ("on_train_epoch_end", alone, ALONE),
        ("on_train_epoch_end", gradients_of, r"gradients of some weights.*loss\.backward"),
        ("on_train_batch_end", fails_alone, "my own mistake"),
    ],
)
def test_an_error_is_raised_as_it_is(hook: str, use: Any, message: str, tmp_path: Path) -> None:
    """Of what ranks cannot do together, or of one rank: the end of the run hides none."""
    with pytest.raises(Exception, match=message) as found:
        fit(tmp_path / "2", 2, Scaled({hook: [use]}), Notes())
    assert use is gradients_of or "weights of pipelined layers" not in str(found.value)


class OfOthers(torch.optim.SGD):
    """As one of another package."""


def test_an_optimizer_that_may_mix_weights_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = OfOthers([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    check_optimizers([optimizer, torch.optim.Adam(optimizer.param_groups[0]["params"])], 2)
    check_optimizers([optimizer], 1)
    [text] = caplog.messages
    assert text.startswith("OfOthers is not an optimizer of torch.optim")


def reads_alone_then_saves(module: Any) -> Any:
    found = norm_of(module.parameters()) if module.global_rank == 0 else None
    module.trainer.strategy.barrier()
    module.trainer.save_checkpoint(Path(module.trainer.default_root_dir) / "own.ckpt")
    return found


def test_a_rank_that_reads_alone_is_answered_where_ranks_meet_next(tmp_path: Path) -> None:
    module = Scaled({"on_train_epoch_end": [reads_alone_then_saves]})
    found, _ = fit(tmp_path / "2", 2, module, default_root_dir=tmp_path)
    saved = torch.load(tmp_path / "own.ckpt", weights_only=False)["state_dict"]
    expected = norm_of([saved[name] for name, _ in module.named_parameters()])
    torch.testing.assert_close(found[-1], expected, rtol=1e-10, atol=0)


def test_checkpoints_after_resuming_have_the_newest_states(tmp_path: Path) -> None:
    """A single number, which is on all ranks, and its state, which is its stage's."""
    saved: list[Any] = []
    for num_stages in 0, 2:
        folder = tmp_path / str(num_stages)
        for num_epochs, path in ((1, None), (EPOCHS, folder / "epoch=0.ckpt")):
            torch.manual_seed(0)
            keeps = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
            trainer = make_trainer(num_stages, num_epochs, keeps)
            trainer.fit(Scaled({}), datamodule=datamodule(), ckpt_path=path)
        saved.append(torch.load(folder / f"epoch={EPOCHS - 1}.ckpt", weights_only=False))
    [expected], [found] = (one["optimizer_states"] for one in saved)
    assert_seen(
        [found["state"], saved[1]["state_dict"]], [expected["state"], saved[0]["state_dict"]]
    )

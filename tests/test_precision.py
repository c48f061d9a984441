"""Precisions that Lightning knows, on stages: as on one device, to the precision's tolerance."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, get_args

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnnpipe import GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.types import StalenessName
from tests.helpers.cases import covering, slow
from tests.helpers.realistic import Realistic
from tests.helpers.trainers import datamodule, make_trainer, quiet_trainer, start_method


class Overflows(torch.autograd.Function):
    """Has infinite gradients while `is_on`."""

    is_on = False

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * torch.inf if Overflows.is_on else grad


class First(gnn.GATv2Conv):
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args) + Overflows.apply(self.bias)  # type: ignore


class Converts(Realistic):
    """Takes graphs of any dtype; its optimizer does nothing that half precision could not follow.

    Args:
        overflow_at: The step in which the gradient of a weight of the first layer is infinite.
        fused: Use an optimizer that looks at the loss scale by itself.
    """

    def __init__(self, overflow_at: int | None = None, fused: bool = False) -> None:
        super().__init__()
        if overflow_at is not None:
            self.net.first = First(8, 4, heads=2, edge_dim=2)
        self.overflow_at, self.fused = overflow_at, fused

    def forward(self, data: Data) -> Tensor:
        data = data.clone()
        for name in ("x", "edge_attr"):
            data[name] = data[name].to(self.head.weight.dtype)
        return super().forward(data)

    def on_train_batch_start(self, *_: Any) -> None:
        Overflows.is_on = self.trainer.fit_loop.total_batch_idx == self.overflow_at

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.fused:
            return torch.optim.Adam(self.parameters(), lr=0.02, fused=True)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ScaleWitness(L.Callback):
    """Writes the loss scale of each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        scaler = trainer.precision_plugin.scaler
        with (self.folder / f"scales{trainer.global_rank}").open("a") as file:
            file.write(f"{scaler.get_scale()} ")


def precision_args(precision: str, growth_interval: int = 2) -> dict[str, Any]:
    """Return what to give the Trainer: on CPU it would make bfloat16 of "16-mixed"."""
    if precision != "16-mixed":
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=growth_interval)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def fit(
    folder: Path,
    num_stages: int,
    module: Realistic,
    *callbacks: L.Callback,
    epochs: int = 5,
    ckpt_path: Path | None = None,
    **kwargs: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the checkpoint and the metrics after some epochs of training."""
    folder.mkdir(exist_ok=True)
    saver = ModelCheckpoint(folder, save_last=True)
    trainer = make_trainer(num_stages, epochs, saver, *callbacks, **kwargs)
    trainer.fit(module, datamodule=datamodule(), ckpt_path=ckpt_path)
    return torch.load(folder / "last.ckpt", weights_only=True), trainer.callback_metrics


def seeded(**kwargs: Any) -> Converts:
    L.seed_everything(1, verbose=False)
    return Converts(**kwargs)


# Of weights and of losses. In bfloat16 two runs are as far from each other as each is from float64.
TOLERANCES = {
    "32-true": (1e-6, 1e-6),
    "64-true": (1e-10, 1e-10),
    "bf16-mixed": (5e-3, 5e-3),
    "16-mixed": (1e-3, 1e-3),
    "bf16-true": (1.5e-2, 8e-2),
    "16-true": (3e-3, 3e-3),
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("precision", "num_stages"), covering(TOLERANCES, [1, 2, 3]))
def test_precisions_equal_plain_lightning(precision: str, num_stages: int, tmp_path: Path) -> None:
    (expected, plain_metrics), (found, metrics) = (
        fit(tmp_path / str(n), n, seeded(), gradient_clip_val=0.5, **precision_args(precision))
        for n in (0, num_stages)
    )
    of_weights, of_losses = TOLERANCES[precision]
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=0, atol=of_weights)
    for name in ("train_loss", "val_loss"):
        assert float(metrics[name]) == pytest.approx(float(plain_metrics[name]), rel=of_losses)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("precision", "num_stages", "num_shards"),
    [
        slow("32-true", 1, 2),
        ("bf16-mixed", 1, 2),
        ("16-mixed", 1, 2),
        slow("bf16-true", 1, 2),
        slow("bf16-mixed", 1, 1),
        slow("bf16-mixed", 2, 1),
    ],
)
def test_ranks_are_as_close_to_double_precision(
    precision: str, num_stages: int, num_shards: int, tmp_path: Path
) -> None:
    exact, _ = fit(tmp_path / "exact", 0, seeded(), precision="64-true")

    def error(run: dict[str, Any]) -> float:
        pairs = [(run["state_dict"][name], one) for name, one in exact["state_dict"].items()]
        return max(float((found.double() - one).abs().max()) for found, one in pairs)

    runs = []
    for stages, shards in ((0, 1), (num_stages, num_shards)):
        folder, options = tmp_path / str(stages), precision_args(precision)
        runs.append(fit(folder, stages, seeded(), num_shards=shards, **options)[0])
    plain, found = map(error, runs)
    assert plain > 0 and found < 2 * plain


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("num_stages", "fused"), covering([1, 2, 3], [False, True]))
def test_an_overflow_on_one_stage_skips_the_step(
    num_stages: int, fused: bool, tmp_path: Path
) -> None:
    """The weight whose gradient overflows is that of the first stage alone."""
    runs = []
    for number in (0, num_stages):
        folder, module = tmp_path / str(number), seeded(overflow_at=3, fused=fused)
        args = precision_args("16-mixed")
        runs.append(fit(folder, number, module, ScaleWitness(folder), **args)[0])
    expected, found = runs
    assert found["MixedPrecision"] == expected["MixedPrecision"]
    for path in ("0/scales0", *(f"{num_stages}/scales{rank}" for rank in range(num_stages))):
        assert (tmp_path / path).read_text() == "1024.0 2048.0 2048.0 1024.0 1024.0 "
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=0, atol=2e-3)


class Scales(MixedPrecision):
    """Scales losses, and computes in the precision of the module."""

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "num_stages"), covering(get_args(StalenessName), [1, 2]))
def test_a_loss_scale_leaves_no_trace(num_stages: int, staleness: Any, tmp_path: Path) -> None:
    """It grows after every second step; in double precision that leaves no trace."""
    strategy = {"num_chunks": 4, "staleness": staleness, "start_method": start_method()}
    runs = []
    for name in ("plain", "scaled"):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        options = {"strategy": GNNPipeStrategy(**strategy), "devices": num_stages}
        if name == "scaled":
            options["plugins"] = [Scales("16-mixed", "cpu", scaler)]
        runs.append(fit(tmp_path / name, 0, seeded().double(), epochs=7, **options)[0])
    plain, scaled = (run["state_dict"] for run in runs)
    torch.testing.assert_close(scaled, plain, rtol=1e-10, atol=1e-10)


class OnDegrees(Converts):
    """Its first layer counts degrees in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.net.first = Counting(8, 8)


class Counting(gnn.ClusterGCNConv):
    def forward(self, x: Tensor, edge_index: Tensor, *_: Any) -> Tensor:
        return super().forward(x, edge_index)


@pytest.mark.parametrize("options", [{"recompute": True}, {"exact_in_chunks": True}])
def test_layers_run_again_in_the_dtype_of_the_precision(options: dict[str, Any]) -> None:
    """Lightning makes it the default dtype within training_step, not within backward."""

    def train(piped: dict[str, Any] | None) -> dict[str, Tensor]:
        L.seed_everything(1, verbose=False)
        module, warmup = OnDegrees(), StalenessWarmup(num_epochs=1000)
        callbacks = [] if piped is None else [warmup]
        trainer = quiet_trainer(1, piped, max_epochs=3, precision="64-true", callbacks=callbacks)
        trainer.fit(module, datamodule=datamodule())
        return module.state_dict()

    found = train({"num_chunks": 4, **options})
    torch.testing.assert_close(found, train(None), rtol=0, atol=1e-10)

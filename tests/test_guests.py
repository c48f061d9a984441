"""Callbacks that average the weights of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.nn as gnn
from lightning.pytorch import callbacks as stock
from torch import Tensor, nn

from lightning_gnnpipe.engine import PipelineEngine
from tests.helpers.cases import slow
from tests.helpers.realistic import Realistic
from tests.helpers.trainers import assert_same, datamodule, make_trainer

pytestmark = pytest.mark.usefixtures("double")


class NormNet(nn.Module):
    """Norms with running statistics in all stages, and no bias before them, without effect.

    Args:
        has_encoder: Every layer reads what one makes of the batch: stages share its weights.
    """

    def __init__(self, has_encoder: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv(8, 8, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.lin_in = nn.Linear(8, 8) if has_encoder else None

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> dict[str, Any]:
        x = x_0 = x if self.lin_in is None else self.lin_in(x).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edge_index)).relu()
            x = x if self.lin_in is None else x + x_0
        return {"h": x, "both": (x, x * 2)}


AVERAGES: dict[str, Callable[[], L.Callback]] = {
    "ema": lambda: stock.EMAWeightAveraging(decay=0.7),
    "ema, parameters alone": lambda: stock.EMAWeightAveraging(
        decay=0.7, use_buffers=False, update_starting_at_step=2
    ),
    "swa": lambda: stock.StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_epochs=2),
    "swa, linear": lambda: stock.StochasticWeightAveraging(
        0.03, swa_epoch_start=1, annealing_strategy="linear"
    ),
}


def seeded(has_norms: bool = False, has_encoder: bool = False) -> Realistic:
    L.seed_everything(1, verbose=False)
    module = Realistic()
    if has_norms:
        module.net = NormNet(has_encoder)
    return module


def fit(
    folder: Path,
    num_stages: int,
    module: L.LightningModule,
    *callbacks: L.Callback,
    epochs: int = 6,
    **kwargs: Any,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the metrics, and the checkpoint that was saved after the last epoch."""
    saver = stock.ModelCheckpoint(folder, save_last=True, monitor="val_loss", save_top_k=-1)
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = make_trainer(num_stages, epochs, *callbacks, saver, **kwargs)
    trainer.fit(module, datamodule=datamodule(), ckpt_path=ckpt_path)
    for path in folder.glob("*.ckpt"):
        saved = torch.load(path, weights_only=False)
        assert all(tensor.numel() for tensor in saved["state_dict"].values())
    saved = torch.load(folder / "last.ckpt", weights_only=False)
    saved.pop("loops")
    saved.pop("gnnpipe", None)
    saved["callbacks"] = {k: v for k, v in saved["callbacks"].items() if "Averaging" in k}
    return trainer.callback_metrics, saved


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("kind", "has_norms", "has_encoder", "num_stages"),
    [
        ("ema", True, False, 2),
        ("ema, parameters alone", False, False, 1),
        slow("swa, linear", False, False, 2),
        slow("ema", True, True, 3),
        ("swa", True, True, 2),
    ],
)
def test_averaged_weights_equal_plain_lightning(
    kind: str, has_norms: bool, has_encoder: bool, num_stages: int, tmp_path: Path
) -> None:
    """In validation, in all that a checkpoint holds, and in the module at the end."""
    plain, ours = seeded(has_norms, has_encoder), seeded(has_norms, has_encoder)
    expected, plain_saved = fit(tmp_path / "0", 0, plain, AVERAGES[kind]())
    found, saved = fit(tmp_path / "1", num_stages, ours, AVERAGES[kind]())
    assert_same(ours, plain)
    assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))
    for name in ("val_loss", "train_loss"):
        assert_close(found[name], expected[name])
    assert saved.keys() == plain_saved.keys()
    for name in ("state_dict", "current_model_state", "averaging_state"):
        if name in plain_saved:
            assert_close(saved[name], plain_saved[name])
    for name, state in plain_saved["callbacks"].items():
        averaged = state.pop("average_model_state", {})
        assert_close(saved["callbacks"][name].pop("average_model_state", {}), averaged)
        assert saved["callbacks"][name] == state
    assert_close(saved["optimizer_states"][0]["state"], plain_saved["optimizer_states"][0]["state"])


def test_the_last_pass_over_averages_reads_no_stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories, and their statistics, are of the weights before the average."""
    exact: list[bool] = []
    train = PipelineEngine._train

    def watched(self: PipelineEngine, *args: Any) -> Any:
        exact.append(self.controls.is_exact)
        return train(self, *args)

    monkeypatch.setattr(PipelineEngine, "_train", watched)
    trainer = make_trainer(1, 4, AVERAGES["swa"]())
    trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "StalenessWarmup"]
    trainer.fit(seeded(has_norms=True), datamodule=datamodule())
    assert exact == [False] * 4 + [True]

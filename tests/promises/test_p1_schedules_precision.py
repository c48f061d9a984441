"""P1 for schedules of micro-batches in half precision: as fill-drain, loss scale and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.helpers.record import assert_steps_equal
from tests.helpers.staged import Staged, batches_of_all_sizes
from tests.helpers.staged_fits import fit, single
from tests.helpers.trainers import overflow


def test_half_precision_is_that_of_fill_drain(tmp_path: Path) -> None:
    """To the bit where there is one micro-batch; else sums are rounded in another order."""
    shared: dict[str, Any] = {"trainer_kwargs": {"precision": "bf16-mixed"}, "num_chunks": 4}
    batches = [single(data) for data in batches_of_all_sizes()]
    plain, *others = [
        fit(name, num_stages, tmp_path, module=Staged().float(), batches=batches, **shared)[0]
        for name, num_stages in (("fill_drain", 1), ("1f1b", 1), ("1f1b", 2), ("interleaved", 2))
    ]
    assert_steps_equal(others[0].steps[:1], plain.steps[:1], 0.0)
    for run in others:
        for ours, theirs in zip(run.steps, plain.steps, strict=True):
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-2, atol=0)
            left, right = (
                torch.cat([step.gradients[name].flatten() for name in sorted(step.gradients)])
                for step in (ours, theirs)
            )
            assert (left - right).norm() < 2e-2 * right.norm()


class Overflowing(Staged):
    """The gradient of a weight overflows in the third step."""

    def on_after_backward(self) -> None:
        if self.num_steps == 3:
            overflow(self, self.net.convs[2].lin_l.bias)

    def loss(self, kind: str, *args: Any) -> Tensor:
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale(), batch_size=1)
        return super().loss(kind, *args)


def test_a_loss_scale_is_that_of_fill_drain(tmp_path: Path) -> None:
    """It grows after two steps, and falls where a gradient overflows on one rank."""
    batches = [single(data) for data in batches_of_all_sizes()]
    runs = []
    for name, num_stages in (("fill_drain", 1), ("1f1b", 1), ("interleaved", 2)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        module = Overflowing(("mean over graphs", "mean over nodes")).float()
        trainer = {"plugins": plugins}
        runs.append(
            fit(name, num_stages, tmp_path, module=module, batches=batches, trainer_kwargs=trainer)
        )
    scales = [step["scale"] for step in runs[0][1][0]]
    assert scales[:6] == [1024, 1024, 2048, 1024, 1024, 2048]
    for result, logged in runs[1:]:
        assert all([step["scale"] for step in rank] == scales for rank in logged)
        for ours, theirs in zip(result.steps, runs[0][0].steps, strict=True):
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-2, atol=0)
            for name, weight in theirs.weights.items():
                torch.testing.assert_close(ours.weights[name], weight, rtol=1e-2, atol=1e-4)

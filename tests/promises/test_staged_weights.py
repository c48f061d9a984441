"""P1 to P8 with weights="staged": a rank holds the weights of its stage, and all else is equal."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import TestCase

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

from lightning_gnnpipe import EmbeddingRefresh
from lightning_gnnpipe.chunks import costs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.steps import StagedWeights
from lightning_gnnpipe.trainer import engine_host
from tests.comm.test_transport import run
from tests.helpers import tied
from tests.helpers.graphs import NUM_FEATURES, communities
from tests.helpers.tied import Net, TiedModule
from tests.helpers.trainers import quiet_trainer

EPOCHS = 4


class Module(TiedModule):
    """Writes what its rank holds after each step, and runs its network in a hook."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.found = list[Any]()

    def validation_step(self, data: Data, batch_idx: int) -> None:
        out = self.head(self.net(data.x, data.edge_index))
        self.log("val", F.cross_entropy(out, data.y), batch_size=1)

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()
        states = {p for p, state in optimizer.optimizer.state.items() if state}
        held = {name: p.numel() for name, p in self.named_parameters()}
        adams = {name for name, p in self.named_parameters() if p in states}
        with self.trainer.strategy.gathered():  # type: ignore[attr-defined]
            whole = {name: p.detach().clone() for name, p in self.named_parameters()}
        bytes_by_kind = self.trainer.strategy.engine.last_step.record.bytes_by_kind
        self.found.append((held, adams, whole, bytes_by_kind))

    def on_train_end(self) -> None:
        torch.save(self.found, self.folder / f"{self.global_rank}.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def fit(
    folder: Path,
    *,
    num_stages: int = 2,
    weights: str = "staged",
    module: Module | None = None,
    resume: Path | None = None,
    callbacks: tuple[L.Callback, ...] = (),
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """Train, and return what each rank found after each step."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    piped = {"num_chunks": 3, "pipelined_module": "net", "balance": "uniform", **(strategy or {})}
    num_replicas = piped.get("data_parallel", 1)
    num_ranks = num_stages * num_replicas * piped.get("graph_parallel", 1)
    saver = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    options = {"max_epochs": EPOCHS, "gradient_clip_val": 0.1, **options}
    trainer = quiet_trainer(
        num_ranks,
        {"weights": weights, **piped},
        callbacks=[saver, *callbacks],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        **options,
    )
    data = communities(3).data
    graphs = [data.clone().update({"x": data.x * (1 + one)}) for one in range(num_replicas)]
    loader = (GraphLoader if num_replicas > 1 else partial(DataLoader, batch_size=None))(graphs)
    module = (module or Module(folder)).double()
    trainer.fit(module, loader, loader, ckpt_path=resume)
    after = {name: p.detach() for name, p in module.named_parameters()}
    return [after, *(torch.load(folder / f"{rank}.pt") for rank in range(num_ranks))]


def assert_equal_weights(staged: list[Any], whole: list[Any]) -> None:
    torch.testing.assert_close(staged[0], whole[0], rtol=1e-10, atol=1e-10)
    for found, expected in zip(staged[1:], whole[1:], strict=True):
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one[2], two[2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("num_stages", "options"),
    [
        (2, {"accumulate_grad_batches": 2}),
        (3, {"gradient_clip_algorithm": "value"}),
        (2, {"strategy": {"graph_parallel": 2, "repeat_encoder": True}}),
        (2, {"strategy": {"data_parallel": 2}}),
    ],
)
def test_p1_staged_weights_train_as_whole_ones(
    num_stages: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Tied weights, clipping, running statistics and validation among them; all ranks agree."""
    staged = fit(tmp_path / "staged", num_stages=num_stages, **options)
    whole = fit(tmp_path / "whole", num_stages=num_stages, weights="whole", **options)
    assert_equal_weights(staged, whole)
    first, *others = [[step[2] for step in steps] for steps in staged[1:]]
    for steps in others:
        for one, two in zip(first, steps, strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)


def test_p5_a_rank_holds_the_weights_of_its_stage_and_receives_no_gradients_of_others(
    tmp_path: Path,
) -> None:
    """Only gradients of weights that several stages or all ranks hold are sent."""
    _, *ranks = fit(tmp_path)
    shared = {"lin_in.weight", "lin_in.bias", "head.weight", "head.bias"}
    tied = {"net.convs.0.bias", "net.convs.0.lin.weight"}
    names = [{name for name, size in steps[-1][0].items() if size} for steps in ranks]
    assert names[0] & names[1] == tied | shared
    assert "net.convs.1.lin.weight" in names[0] - names[1]
    assert "net.convs.2.lin.weight" in names[1] - names[0]
    assert names[0] | names[1] == set(ranks[0][-1][2])
    for own, steps in zip(names, ranks, strict=True):
        assert steps[-1][1] == own
    sizes = {name: one.numel() + 1 for name, one in ranks[0][-1][2].items()}  # 1: has a gradient
    received = sum(steps[-1][3]["weight_grad"] for steps in ranks)
    assert received == 8 * (2 * sum(map(sizes.get, tied)) + sum(map(sizes.get, shared)))


def test_p6_checkpoints_are_stock_files_that_any_layout_resumes(tmp_path: Path) -> None:
    fit(tmp_path / "first", max_epochs=2)
    file = tmp_path / "first" / "epoch=1.ckpt"
    found = torch.load(file, weights_only=True)
    module = Module(tmp_path).double()
    module.load_state_dict(found["state_dict"])
    [states] = [one["state"] for one in found["optimizer_states"]]
    sizes = [state["exp_avg"].numel() for _, state in sorted(states.items())]
    assert sizes == [p.numel() for p in module.parameters()]
    whole = fit(tmp_path / "whole", num_stages=3, weights="whole", resume=file)
    assert_equal_weights(fit(tmp_path / "staged", num_stages=3, resume=file), whole)
    torch.testing.assert_close(fit(tmp_path / "one", num_stages=1, resume=file)[0], whole[0])


class Reading(Module):
    """Calls its network in a hook, in evaluation with random numbers, and changes weights."""

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.drawn = [self.net(data.x, data.edge_index, p=0.5) for _ in range(2)]
        self.exact, self.data = self.net(data.x, data.edge_index), data

    def on_validation_epoch_end(self) -> None:
        assert not torch.equal(*self.drawn)
        with pytest.raises(UnsupportedError, match=r"strategy\.gathered"):
            self.net(self.data.x, self.data.edge_index)
        strategy: Any = self.trainer.strategy
        with strategy.gathered():
            out = self.net(self.data.x, self.data.edge_index)
            before = [p.detach().clone() for p in self.parameters()]
            for parameter in self.parameters():
                parameter.data *= 0.5
        torch.testing.assert_close(out, self.exact)
        with strategy.gathered():
            for old, new in zip(before, self.parameters(), strict=True):
                assert torch.equal(0.5 * old, new)
        self.found.append(len(before))


class Drawing(Net):
    def forward(self, x: Tensor, edge_index: Tensor, p: float = 0.0) -> Tensor:
        return F.dropout(super().forward(x, edge_index), p) if p else super().forward(x, edge_index)


def test_gathered_weights_can_be_read_called_and_changed(tmp_path: Path) -> None:
    module = Reading(tmp_path)
    module.net = Drawing(module.lin_in)
    for steps in fit(tmp_path, module=module, max_epochs=2)[1:]:
        assert [one for one in steps if isinstance(one, int)] == [
            len(list(module.parameters()))
        ] * 2


class Failing(Module):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1 and self.current_epoch == 2:
            raise KeyError("no such thing")


def test_p7_a_failing_rank_ends_all_and_no_partial_checkpoint_is_saved(tmp_path: Path) -> None:
    saver = OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(ProcessRaisedException, match="no such thing"):
        fit(tmp_path, module=Failing(tmp_path), callbacks=(saver,))
    assert (tmp_path / "epoch=1.ckpt").exists()
    assert not (tmp_path / "failed.ckpt").exists()


def lose(transport: Transport) -> None:
    own, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    staged, stage = StagedWeights(transport), transport.mesh.stage
    with staged.gathered():
        staged.assign({own: {stage}, other: {1 - stage}})
    assert other.numel() == 0
    with TestCase().assertLogs("lightning_gnnpipe", "ERROR") as logged:
        staged.lose()
    assert "1 weights of other stages are lost" in logged.output[0]
    assert other.shape == (3,) and other.isnan().all() and own.tolist() == [1.0, 1.0]


def test_after_an_error_weights_of_other_stages_are_no_numbers(tmp_path: Path) -> None:
    run(lose, tmp_path)


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class WithPenalty(Module):
    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        penalty = sum(p.square().sum() for p in self.net.parameters())
        return super().training_step(data, batch_idx) + 1e-3 * penalty


class WithLion(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Lion(self.parameters())


SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (Module, {"callbacks": (StochasticWeightAveraging(0.1),)}, "got StochasticWeightAveraging"),
        (Module, {"callbacks": (ModelPruning("l1_unstructured", amount=0.5),)}, "got ModelPruning"),
        (WithLion, {}, "got Lion, which may need all weights"),
        (Module, {"plugins": [SCALED]}, 'got precision="16-mixed"'),
        (WithPenalty, {}, "The loss may read weights of the pipelined module"),
    ],
)
def test_what_needs_all_weights_is_refused(
    kind: type[Module], options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ProcessRaisedException, match=f"(?s){text}.*weights='whole'"):
        fit(tmp_path, module=kind(tmp_path), **options)


def test_the_start_warns_of_large_gradients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_host, "_MUCH_BYTES", 1)
    monkeypatch.setattr(tied, "D", 64)
    monkeypatch.setattr(engine_host.log, "warning", lambda text, *args: print(text % args))
    monkeypatch.setattr(engine_host, "rank_zero_info", print)
    monkeypatch.setattr(costs, "_DISTURBED", float("inf"))  # other tests run
    for weights in ("whole", "staged"):
        fit(
            tmp_path,
            weights=weights,
            strategy={"balance": "measured"},
            max_epochs=1,
        )
        out = capfd.readouterr().out
        assert "on one device with one chunk" in out
        sent = r"of weights\. weights='staged' sends [\d.]+ MiB a step, 'whole' [\d.]+ MiB\."
        assert bool(re.search(sent, out)) == (weights == "whole")


class Books(L.LightningModule):
    """Is the pipelined module itself; the first rank alone keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(gnn.SAGEConv(NUM_FEATURES, NUM_FEATURES) for _ in range(3))
        self.losses = list[float]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        loss = self(data.x, data.edge_index).square().mean()
        if self.trainer.is_global_zero:
            self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


@pytest.mark.parametrize(("weights", "refreshes"), [("whole", True), ("staged", False)])
def test_attributes_that_differ_between_ranks_are_traced_by_all(
    weights: str, refreshes: bool
) -> None:
    found = []
    callbacks = [EmbeddingRefresh(1)] if refreshes else []
    for num_ranks in (1, 2):
        module = Books().double()
        piped = {"num_chunks": 1 + refreshes, "weights": weights}
        trainer = quiet_trainer(num_ranks, piped, max_epochs=EPOCHS, callbacks=callbacks)
        trainer.fit(module, DataLoader([communities(3).data], batch_size=None))
        found.append(module.state_dict())
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)

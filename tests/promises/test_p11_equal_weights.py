"""P11: after each optimizer step all ranks hold equal bits: weights, buffers, optimizer states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

from lightning_gnnpipe.callbacks import EmbeddingRefresh
from lightning_gnnpipe.chunks import Step
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.steps import StagedWeights
from lightning_gnnpipe.steps.gradient_sums import GradientSums
from tests.comm.test_transport import TIMEOUT, run
from tests.helpers.graphs import communities
from tests.helpers.tied import TiedModule
from tests.helpers.trainers import quiet_trainer


class Module(TiedModule):
    """Its encoder is used in the pipelined module as well as outside; its head is outside."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.states: list[tuple[list[Tensor], list[Tensor]]] = []

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.net(data.x, data.edge_index)

    def on_train_batch_end(self, *args: Any) -> None:
        self.note()

    def on_validation_end(self) -> None:
        self.note()

    def note(self) -> None:
        state = self.optimizers().optimizer.state  # type: ignore[union-attr]
        found: list[Tensor] = list(self.parameters())
        for parameter in self.parameters():
            found += state.get(parameter, {}).values()
        both = found, list(self.buffers())
        self.states.append(tuple([one.detach().clone() for one in kind] for kind in both))

    def on_train_end(self) -> None:
        torch.save(self.states, self.folder / f"{self.global_rank}.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"graph_parallel": 2}),
        (2, {}),
        (4, {"graph_parallel": 2}),
        (3, {}),
        (4, {"data_parallel": 2}),
    ],
)
def test_p11_all_ranks_hold_equal_bits(
    num_ranks: int, options: dict[str, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    trainer = quiet_trainer(
        num_ranks,
        {"num_chunks": 3, "pipelined_module": "net", **options},
        max_epochs=4,
        gradient_clip_val=0.1,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
        callbacks=[] if "data_parallel" in options else [EmbeddingRefresh(1)],
    )
    data = communities(3).data
    loader = DataLoader([data] * 2, batch_size=None)
    if "data_parallel" in options:  # replicas train on batches of graphs, each on its own
        graphs = [data.clone().update({"x": data.x * (1 + one)}) for one in range(8)]
        loader = GraphLoader(graphs, batch_size=2)
    trainer.fit(Module(tmp_path).double(), loader, loader)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]
    assert len(ranks[0]) == 4 * (2 + 1)
    assert not torch.equal(ranks[0][0][0][0], ranks[0][-1][0][0])
    for rank, states in enumerate(ranks):
        # As under DDP, a replica's running statistics are its own until a validation.
        of_replica = ranks[2 * (rank // 2)] if "data_parallel" in options else ranks[0]
        for (first, _), (found, buffers), (_, expected) in zip(
            ranks[0], states, of_replica, strict=True
        ):
            pairs = zip([*first, *expected], [*found, *buffers], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


USERS = {"first": {0}, "second": {1}, "third": {2}, "tied": {0, 1, 2}, "outer": {0, 2}}
PARTS = [1.0, 1e8, -1e8]  # of each stage


def await_gradients(transport: Transport) -> int:
    """Wait for the gradients that are expected now; return the number of messages."""
    number = 0
    for label, (works, _) in transport._receives.items():
        if label.kind == "weight_grad":
            for work in works:
                work.wait(TIMEOUT)
            works.clear()  # no work may be waited for again
            number += 1
    return number


def sum_gradients(transport: Transport) -> None:
    """Sums run from the last stage to the first."""
    stage = transport.mesh.stage
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in USERS})
    for name in ("first", "tied"):
        module[name].grad = torch.ones(2)  # of an earlier pass
    sums = GradientSums(module, USERS, transport, StagedWeights(transport))
    sums.begin()
    for name, users in USERS.items():
        if stage in users:
            before = module[name].grad
            module[name].grad = torch.full((2,), PARTS[stage]) + (0 if before is None else before)
    sums.expect_later()
    if stage == 0:
        assert await_gradients(transport) == 4
    sums.finish()
    found = {name: one.grad.tolist()[0] for name, one in module.items()}
    wanted = {"first": 2.0, "second": 1e8, "third": -1e8, "tied": 2.0, "outer": -1e8}
    assert found == wanted


def test_p11_gradients_arrive_before_the_first_stage_ends_and_are_summed_in_order(
    tmp_path: Path,
) -> None:
    run(sum_gradients, tmp_path, (3, 1))


def test_p11_the_last_chunk_of_the_first_stage_hides_gradients_of_later_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed when they have come."""
    differentiate = Step._differentiate

    def await_first(self: Step, *args: Any) -> list[Tensor]:
        if self.spec.transport.mesh.stage == 0 and len(self._states) == 1:
            assert await_gradients(self.spec.transport) > 0
        return differentiate(self, *args)

    monkeypatch.setattr(Step, "_differentiate", await_first)
    trainer = quiet_trainer(3, {"num_chunks": 3, "pipelined_module": "net"}, max_epochs=2)
    data = DataLoader([communities(3).data], batch_size=None)
    trainer.fit(Module(tmp_path).double(), data)

"""P11: after each optimizer step all ranks hold equal bits: weights, buffers, optimizer states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

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

"""What the code of the documentation is run with: a small graph, few epochs, quiet Trainers.

The blocks are run as they are printed, but for this: PyG's Planetoid is a graph of 70 nodes, with
Cora's numbers of features and classes; `make_communities` makes 200 nodes; no Trainer runs longer
than 4 epochs, of which a StalenessWarmup makes one exact; Trainers show neither progress nor
summaries. Commands run 2 epochs.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import lightning as L
import pytest
import torch
import torch_geometric.datasets
from torch_geometric.data import Data, InMemoryDataset

import lightning_gnnpipe
from lightning_gnnpipe import GNNPipeStrategy, StalenessWarmup, make_communities

NUM_NODES, NUM_FEATURES, NUM_CLASSES = 70, 1433, 7
MOST_EPOCHS, MOST_EXACT_EPOCHS = 4, 1


def install(
    patch: pytest.MonkeyPatch, start_method: str | None = None, most_epochs: int = MOST_EPOCHS
) -> None:
    """Make everything small; `start_method` is for strategies that would run the script again."""
    patch.setattr(torch_geometric.datasets, "Planetoid", SmallPlanetoid)
    patch.setattr(lightning_gnnpipe, "make_communities", lambda num_nodes: make_communities(200))
    _give(patch, StalenessWarmup, num_epochs=MOST_EXACT_EPOCHS)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    _give(patch, L.Trainer, max_epochs=most_epochs, **quiet)
    if start_method is not None:
        _give(patch, GNNPipeStrategy, start_method=start_method)


class SmallPlanetoid(InMemoryDataset):
    """A ring with chords, its labels in the features; takes the arguments of Planetoid."""

    def __init__(self, root: str, name: str, split: str = "public", transform: Any = None) -> None:
        super().__init__(None, transform)
        node = torch.arange(NUM_NODES)
        hops = [(node, (node + hop) % NUM_NODES) for hop in (1, 2, 7)]
        y = node % NUM_CLASSES
        graph = Data(
            x=torch.nn.functional.one_hot(y, NUM_FEATURES).float(),
            edge_index=torch.cat(
                [torch.stack(pair) for s, t in hops for pair in ((s, t), (t, s))], 1
            ),
            y=y,
            train_mask=node % 3 == 0,
            val_mask=node % 3 == 1,
            test_mask=node % 3 == 2,
        )
        self.data, self.slices = self.collate([graph])


def _give(patch: pytest.MonkeyPatch, owner: type, **arguments: Any) -> None:
    """Let `owner` be built with these arguments, numbers at the most."""
    original: Any = owner.__init__

    def limit(given: Any, most: Any) -> Any:
        return min(given or most, most) if type(most) is int else most

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        limited = {name: limit(kwargs.get(name), most) for name, most in arguments.items()}
        original(self, *args, **{**kwargs, **limited})

    patch.setattr(owner, "__init__", init)

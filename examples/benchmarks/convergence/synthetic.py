"""Made graphs: one with the ratios of ogbn-arxiv at a tenth of its size, and a denser one.

Of ogbn-arxiv: 40 classes, the largest a sixth of all nodes, 13.7 edge ends a node with a heavy
tail, two thirds of all edges within a class, 128 features a node that alone tell half of all
labels, 54, 18 and 28 % of the nodes for training, validation and test. Edges within a class are
drawn at random, so METIS finds little to go by: it cuts half of them into 32 chunks. "arxiv-dense"
is harder: 4,000 nodes of 10 classes with 36 edge ends each, of which METIS cuts three quarters.
"""

from __future__ import annotations

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops, to_undirected

NUM_FEATURES = 128
SHARE_WITHIN = 0.65  # of edges that are drawn within their class, before chance adds others
SHARE_MISLABELLED = 0.2
SIGNAL = 0.15  # standard deviation of class centres; that of nodes around them is 1
SPLIT = (0.54, 0.72)  # where training ends, and validation


def make_arxiv_like(
    num_nodes: int = 16_934, mean_degree: float = 13.7, num_classes: int = 40, seed: int = 0
) -> Data:
    """Return the graph: `x` `[num_nodes, 128]`, undirected edges, `y` and the three masks."""
    rng = np.random.default_rng(seed)
    shares = np.minimum(rng.pareto(1.5, num_classes) + 0.2, 4.0)
    classes = rng.choice(num_classes, num_nodes, p=shares / shares.sum())
    pull = np.minimum(rng.pareto(2.0, num_nodes) + 0.3, 100.0)  # expected degrees, in proportion
    sources, targets = draw_edges(rng, classes, pull, round(num_nodes * mean_degree / 2))
    edge_index = torch.from_numpy(np.stack([sources, targets]))
    edge_index, _ = remove_self_loops(edge_index)
    centres = SIGNAL * rng.normal(size=(num_classes, NUM_FEATURES))
    x = centres[classes] + rng.normal(size=(num_nodes, NUM_FEATURES))
    is_wrong = rng.random(num_nodes) < SHARE_MISLABELLED
    labels = np.where(is_wrong, rng.permutation(classes), classes)
    data = Data(
        x=torch.from_numpy(x).float(),
        edge_index=to_undirected(edge_index, num_nodes=num_nodes),
        y=torch.from_numpy(labels),
    )
    place = torch.from_numpy(rng.random(num_nodes))
    data.train_mask = place < SPLIT[0]
    data.val_mask = (place >= SPLIT[0]) & (place < SPLIT[1])
    data.test_mask = place >= SPLIT[1]
    return data


def draw_edges(
    rng: np.random.Generator, classes: np.ndarray, pull: np.ndarray, num_edges: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ends of edges drawn by `pull`, a share of them within a class; both `[num_edges]`."""
    sources, targets = rng.choice(len(classes), (2, num_edges), p=pull / pull.sum())
    is_within = rng.random(num_edges) < SHARE_WITHIN
    for one in np.unique(classes):
        members = np.flatnonzero(classes == one)
        where = np.flatnonzero(is_within & (classes[sources] == one))
        if len(where):
            weights = pull[members]
            targets[where] = rng.choice(members, len(where), p=weights / weights.sum())
    return sources, targets

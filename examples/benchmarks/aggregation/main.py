"""How fast is the aggregation of a linear layer, forward and backward, beside PyG's routes?

OMP_NUM_THREADS=1 python examples/benchmarks/aggregation/main.py
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import LGConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from lightning_gnnpipe.graph import ChunkPlan, partition_nodes, plan_from_assignment
from lightning_gnnpipe.layers import find_layers, intercept
from lightning_gnnpipe.passing import MessageContext
from lightning_gnnpipe.staleness import HistoryStore

sys.path.append(str(Path(__file__).parents[1]))
from common import NUM_NODES, make_edges, print_table

CHANNELS, ROUNDS, NUM_CHUNKS = 128, 5, 32


def main() -> None:
    warnings.filterwarnings("ignore", message="Sparse")
    torch.set_num_threads(1)
    edges, weight = gcn_norm(make_edges(), None, NUM_NODES)
    order = edges[1].argsort()
    sorted_edges, sorted_weight = edges[:, order], weight[order]
    x, grad = torch.randn(NUM_NODES, CHANNELS), torch.randn(NUM_NODES, CHANNELS)
    chunks = partition_nodes(edges, NUM_NODES, num_chunks=NUM_CHUNKS, method="metis")
    plan = plan_from_assignment(edges, NUM_NODES, chunks)
    conv = LGConv(normalize=False)

    def plain(edge_index: Tensor, *weights: Tensor) -> None:
        rows = x.requires_grad_()
        conv(rows, edge_index, *weights).backward(grad)
        x.grad = None

    indexed = EdgeIndex(sorted_edges, sparse_size=(NUM_NODES, NUM_NODES), sort_order="col")
    matrix = torch.sparse_coo_tensor(edges.flip(0), weight, (NUM_NODES,) * 2).to_sparse_csr()
    routes: dict[str, Callable[[], None]] = {
        "PyG, edge_index as it comes": lambda: plain(edges, weight),
        "PyG, edge_index sorted by target": lambda: plain(sorted_edges, sorted_weight),
        "PyG, sorted EdgeIndex": lambda: plain(indexed, sorted_weight),
        "PyG, torch.sparse CSR": lambda: plain(matrix),
        "ours, K=1": in_chunks(plan.whole, conv, weight, x, grad),
        f"ours, K={NUM_CHUNKS}": in_chunks(plan, conv, weight, x, grad),
    }
    for run in routes.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in routes}
    copies = []
    for _ in range(ROUNDS):
        for name, run in routes.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        copies.append(copy_bandwidth())
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    best = medians[f"ours, K={NUM_CHUNKS}"]
    # Every edge reads a row, forward and backward; every output row is written once.
    gathered = 2 * (edges.size(1) + NUM_NODES) * CHANNELS * x.element_size()
    compulsory = 2 * (2 * NUM_NODES * CHANNELS * 4 + edges.size(1) * 8)
    rate = statistics.median(copies)
    rows = [[name, f"{s * 1e3:.0f}", f"{s / best:.1f}"] for name, s in medians.items()]
    rows += [
        [
            "floor: every edge reads its row",
            f"{gathered / rate * 1e3:.0f}",
            f"{gathered / rate / best:.2f}",
        ],
        [
            "floor: rows and edges once",
            f"{compulsory / rate * 1e3:.1f}",
            f"{compulsory / rate / best:.2f}",
        ],
    ]
    print_table(["forward + backward", "ms", f"over ours at K={NUM_CHUNKS}"], rows)


def in_chunks(
    plan: ChunkPlan, conv: LGConv, weight: Tensor, x: Tensor, grad: Tensor
) -> Callable[[], None]:
    """Return a run over all chunks, forward in order and backward against it."""
    store = HistoryStore(NUM_NODES, plan.num_chunks)
    context = MessageContext(store, plan)
    leaf = weight[plan.edge_perm]
    context.leaves = _OneLeaf(leaf)
    chunks = (*plan.whole.chunks, *plan.chunks)
    parts = {chunk: leaf[chunk.edge_start : chunk.edge_end] for chunk in chunks}

    def run() -> None:
        outputs = []
        with intercept(find_layers(conv), context):
            for chunk in plan.chunks if list(store) else plan.whole.chunks:
                part = parts[chunk]
                context.enter(chunk, 0, {"leaf_0": part})
                rows = x[chunk.start : chunk.end].detach().requires_grad_()
                outputs.append((conv(rows, chunk.edge_index, part), chunk))
        for output, chunk in reversed(outputs):
            output.backward(grad[chunk.start : chunk.end])
        store.end_step()

    return run


class _OneLeaf:
    """The edge weights of the graph, as the engine would hand them out."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf

    def whole_edge_leaf(self, name: str, *, edge_set: int | None) -> Tensor | None:
        return self.leaf


def copy_bandwidth() -> float:
    """Return the bytes a second that one copy reads and writes."""
    source = torch.empty(64 * 2**20 // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    return 4 * 2 * source.nbytes / (time.perf_counter() - start)


if __name__ == "__main__":
    main()

"""What does each rank hold if a table of embeddings has one row per node, and what is its peak?

python examples/benchmarks/memory/embeddings.py --gib 2
python examples/benchmarks/memory/embeddings.py --gib 2 --shards 2
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import lightning as L
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

sys.path.append(str(Path(__file__).parents[1]))
from common import make_edges, print_table

from lightning_gnnpipe import GNNPipeStrategy

WIDTH, HIDDEN, NUM_CLASSES = 512, 8, 8
EDGES_A_NODE = 4
GIB = 2**30


class Net(nn.Module):
    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(num_nodes, WIDTH)
        self.convs = nn.ModuleList([GCNConv(WIDTH, HIDDEN)])
        self.convs.extend(GCNConv(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, edge_index: Tensor) -> Tensor:
        x = self.emb.weight
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


class Module(L.LightningModule):
    def __init__(self, net: nn.Module, folder: Path) -> None:
        super().__init__()
        self.net, self.folder = net, folder

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(data.edge_index), data.y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Data, batch_idx: int) -> None:
        """Note what the rank holds, and the peak of the step before."""
        found = {"resident": psutil.Process().memory_info().rss, "peak": _peak()}
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(found))


def _peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Resets(L.Callback):
    """Begins the peak anew once weights are with their stages."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        _reset_peak()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gib", type=float, default=2.0, help="of the table")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--shards", type=int, default=1, help="2 instead of two stages")
    options = parser.parse_args()
    num_nodes = int(options.gib * GIB) // (4 * WIDTH)
    edges = make_edges(num_nodes, EDGES_A_NODE * num_nodes)
    data = Data(edge_index=edges, y=torch.arange(num_nodes) % NUM_CLASSES, num_nodes=num_nodes)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        module = Module(Net(num_nodes), Path(folder))
        strategy = GNNPipeStrategy(
            num_chunks=options.chunks,
            graph_parallel=options.shards,
            partition="contiguous",
            start_method="fork",
        )
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            max_epochs=4,
            callbacks=[Resets()],
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, DataLoader([data], batch_size=None))  # type: ignore[arg-type]
        for rank in range(2):
            found = json.loads((Path(folder) / f"{rank}.json").read_text())
            numbers = [found[name] / GIB for name in ("resident", "peak")]
            rows.append([str(rank), *(f"{number:.2f}" for number in numbers)])
    print_table(["rank", "resident between steps, GiB", "peak of a step, GiB"], rows)


if __name__ == "__main__":
    main()

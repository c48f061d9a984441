"""One training run, measured: prints step times, peak memory and bytes as one line of JSON.

Run by the benchmarks in processes of their own; `OMP_NUM_THREADS` sets the threads of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from common import NUM_EDGES, NUM_NODES, make_edges
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCN2Conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

sys.path.append(str(Path(__file__).parents[1]))
from graphs import load_graph

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.models import GCNII, NodeClassifier

NUM_CLASSES = 10
NUM_WARM_STEPS = 3  # the exact first step, allocator and caches
MIB = 2**20


class Measure(L.Callback):
    """Times training steps and keeps what the strategy tells of the last one."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.stats: Any = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.step_s.append(time.perf_counter() - self._start)
        if isinstance(trainer.strategy, GNNPipeStrategy):
            self.stats = trainer.strategy.collect_stats()


def main() -> None:
    options = parse_options()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    data = make_data(options)
    num_classes = int(data.y.max()) + 1
    net = GCNII(data.num_features, options.hidden, num_classes, options.layers, 0.0)
    module = NodeClassifier(net, num_classes)
    piped = GNNPipeStrategy(
        num_chunks=options.chunks,
        graph_parallel=options.shards,
        recompute=options.recompute,
        history_dtype=getattr(torch, options.histories),
    )
    if options.mode == "plan":
        print(json.dumps(forecast(piped, module, data, options)))
        return
    if options.mode == "sorted":
        data.edge_index = data.edge_index[:, data.edge_index[1].argsort()]
    elif options.mode == "csr":
        data.edge_index = normalised_csr(data)
        for conv in net.convs:
            assert isinstance(conv, GCN2Conv)
            conv.normalize = False
    measure = Measure()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.stages * options.shards,
        strategy=piped if options.mode == "pipe" else "auto",
        max_epochs=NUM_WARM_STEPS + options.steps,
        callbacks=[measure],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    gc.collect()
    base_mib = psutil.Process().memory_info().rss / MIB
    reset_peak()
    source: Any
    if options.mode == "csr":  # a data module expects 'edge_index'
        whole: Any = [data]
        source = DataLoader(whole, batch_size=1, collate_fn=lambda batch: batch[0])
    else:
        source = FullGraphDataModule(data)
    trainer.fit(module, source)
    result = {
        "step_s": measure.step_s[NUM_WARM_STEPS:],
        "base_mib": base_mib,
        "peak_mib": peak_mib(),
        "bubble_frac": None if measure.stats is None else measure.stats.bubble_frac,
        "sent_bytes": 0 if measure.stats is None else sum(measure.stats.bytes_by_kind.values()),
    }
    if trainer.global_rank == 0:
        print(json.dumps(result))


def forecast(
    strategy: GNNPipeStrategy, module: L.LightningModule, data: Data, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what `strategy.plan` predicts, under the keys of a measurement."""
    plan = strategy.plan(module, data, num_stages=options.stages, link_gbit_per_s=options.link_gbit)
    return {
        "step_s": [plan.step_s],
        "one_device_s": plan.one_device_s,
        "bubble_frac": plan.bubble_frac,
        "forward_s": [cost.forward_s for cost in plan.layer_costs[1:-1]],
        "backward_s": [cost.backward_s for cost in plan.layer_costs[1:-1]],
        "layouts": [
            (one.num_stages, one.num_shards, one.step_s, one.step_bytes) for one in plan.layouts
        ],
    }


def normalised_csr(data: Data) -> Tensor:
    """Return the transposed adjacency matrix, self-loops and weights as GCN's: PyG's best route."""
    edges, weights = gcn_norm(data.edge_index, None, data.num_nodes, dtype=torch.float32)
    size = (data.num_nodes, data.num_nodes)
    return torch.sparse_coo_tensor(edges.flip(0), weights, size).coalesce().to_sparse_csr()


def parse_options() -> argparse.Namespace:
    def flag(text: str) -> bool:
        return text == "True"

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--mode", choices=["pipe", "plan", "plain", "sorted", "csr"], default="pipe")
    add("--dataset", default="synthetic")
    add("--root", default=os.environ.get("GNNPIPE_DATA"))
    add("--stages", type=int, default=1)
    add("--shards", type=int, default=1)
    add("--chunks", type=int, default=8)
    add("--layers", type=int, default=16)
    add("--hidden", type=int, default=128)
    add("--steps", type=int, default=5)
    add("--nodes", type=int, default=NUM_NODES)
    add("--edges", type=int, default=NUM_EDGES)
    add("--link-gbit", type=float, default=10.0)
    add("--recompute", type=flag, default=False)
    add("--histories", choices=["float32", "bfloat16"], default="float32")
    return parser.parse_args()


def make_data(options: argparse.Namespace) -> Data:
    if options.dataset != "synthetic":
        return load_graph(options.dataset, options.root)
    num_nodes = options.nodes
    edges = make_edges(num_nodes, options.edges)
    is_train = torch.rand(num_nodes) < 0.5
    return Data(
        x=torch.randn(num_nodes, options.hidden),
        edge_index=edges,
        y=torch.randint(NUM_CLASSES, (num_nodes,)),
        train_mask=is_train,
        val_mask=~is_train,
        test_mask=~is_train,
    )


def reset_peak() -> None:
    """Let the kernel count the peak of this process's memory from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Return the peak resident memory since `reset_peak`, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()

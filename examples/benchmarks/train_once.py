"""One training run, measured: prints step times, peak memory and bytes as one line of JSON.

Run by the benchmarks in processes of their own; `OMP_NUM_THREADS` sets the threads of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

import lightning as L
import psutil
import torch
import torch.distributed as dist
from common import INSIDE_FRAC, MATMUL, NUM_EDGES, NUM_NODES, make_edges
from link import measure_link
from torch import Tensor
from torch.distributed import FileStore
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCN2Conv, GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import to_undirected

sys.path.append(str(Path(__file__).parents[1]))
from graphs import load_graph

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.chunks import now
from lightning_gnnpipe.comm import Meter, Transport, World
from lightning_gnnpipe.models import GCNII, GNN, NodeClassifier, ResGCNPlus
from lightning_gnnpipe.types import CodecName, CodecOption, StalenessName

PYG = "plain", "sorted", "csr", "checkpointed"  # ways to train without the strategy
NUM_CLASSES = 10
NUM_WARM_STEPS = 3  # the exact first step, allocator and caches
MIB = 2**20


class NormedGCNII(GCNII):
    """GCNII with BatchNorm after each layer."""

    def __init__(self, in_channels: int, hidden_channels: int, *args: Any) -> None:
        super().__init__(in_channels, hidden_channels, *args)
        norms = (torch.nn.BatchNorm1d(hidden_channels) for _ in self.convs)
        self.norms = torch.nn.ModuleList(norms)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x_0 = self.lin_in(self.dropout(x)).relu()
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(self.dropout(x), x_0, edge_index)).relu()
        return self.lin_out(self.dropout(x))


MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": GNN,
    "gcnii": GCNII,
    "gcnii+norm": NormedGCNII,
    "gat": partial(GNN, conv="gat"),
    "sage": partial(GNN, conv="sage"),
    "resgcn+": ResGCNPlus,
}


class Measure(L.Callback):
    """Times training steps and writes them with what the strategy tells of the last one.

    To a file, since the process that reports is not the first rank where ranks are forked.
    """

    def __init__(self, path: Path, num_warm: int, turn: str | None = None) -> None:
        self.path, self.num_warm, self.turn = path, num_warm, turn
        self.step_s: list[float] = []
        self.epoch_starts: list[float] = []
        self.stats: Any = None

    def on_train_start(self, *_: Any) -> None:
        if self.turn is not None:
            wait_for_turn(Path(self.turn))

    def on_train_epoch_start(self, *_: Any) -> None:
        self.epoch_starts.append(time.perf_counter())

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._start = now()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.step_s.append(now() - self._start)
        if isinstance(trainer.strategy, GNNPipeStrategy):
            self.stats = trainer.strategy.collect_stats()

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        stats, own_mib = self.stats, [anonymous.peak_mib]
        if isinstance(trainer.strategy, GNNPipeStrategy):
            everyone = trainer.strategy.engine.transport.everyone
            own_mib = everyone.all_gather_objects(anonymous.peak_mib)
        found = {
            "anonymous_mib": own_mib,
            "step_s": self.step_s[self.num_warm :],
            "epoch_s": [end - start for start, end in pairwise(self.epoch_starts[self.num_warm :])],
            "bubble_frac": None if stats is None else stats.bubble_frac,
            "bytes_by_kind": None if stats is None else stats.bytes_by_kind,
        }
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(found))


class Anonymous(threading.Thread):
    """Notes the peak of this process's anonymous memory above that after imports, every ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mib, self._base_mib = 0.0, self._now_mib()

    @staticmethod
    def _now_mib() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024

    def run(self) -> None:
        while True:
            self.peak_mib = max(self.peak_mib, self._now_mib() - self._base_mib)
            time.sleep(0.001)


anonymous = Anonymous()


def main() -> None:
    anonymous.start()
    options = make_parser().parse_args()
    torch.set_float32_matmul_precision(options.matmul)
    if options.mode == "link":
        print(json.dumps(measure_links(options)))
        return
    data = make_data(options)
    module = make_module(options, data)
    if options.mode == "plan":
        print(json.dumps(forecast(make_strategy(options), module, data, options)))
        return
    if options.mode == "csr":
        use_csr(module, data)
    if options.mode == "checkpointed":
        for conv in module.net.convs:  # type: ignore[union-attr]
            conv.forward = partial(checkpoint, conv.forward, use_reentrant=False)
    with tempfile.TemporaryDirectory() as folder:
        measure = Measure(Path(folder) / "measured.json", options.warm, options.turn)
        trainer = make_trainer(options, measure, options.warm + options.steps)
        gc.collect()
        base_mib = psutil.Process().memory_info().rss / MIB
        reset_peak()
        trainer.fit(module, make_source(options, data))
        if trainer.global_rank == 0:
            found = json.loads(measure.path.read_text())
            if options.accelerator == "gpu":
                base_mib, peak = 0.0, torch.cuda.max_memory_allocated() / MIB
            else:
                peak = peak_mib()
            print(json.dumps({**found, "base_mib": base_mib, "peak_mib": peak}))


def measure_links(options: argparse.Namespace) -> dict[str, float]:
    """Return what a message between this many processes of this machine costs."""
    with tempfile.TemporaryDirectory() as folder:
        size = options.stages * options.graph_parallel
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_measure_link, args=(rank, size, Path(folder)))
            for rank in range(size)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        found: dict[str, float] = json.loads((Path(folder) / "link.json").read_text())
    return found


def _measure_link(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = World(rank, size, torch.device("cpu"), timedelta(minutes=1))
    link = measure_link(Transport(world, (size, 1), Meter()))
    if rank == 0:
        found = {"link_gbit": link.bytes_per_s * 8e-9, "message_us": link.message_s * 1e6}
        (folder / "link.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def forecast(
    strategy: GNNPipeStrategy, module: L.LightningModule, data: Data, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what `strategy.plan` predicts, under the keys of a measurement."""
    plan = strategy.plan(
        module,
        data,
        num_stages=options.stages,
        link_gbit_per_s=options.link_gbit,
        message_us=options.message_us,
    )
    return {
        "step_s": [plan.layout.step_s],
        "one_device_s": plan.layouts[0].step_s,
        "bubble_frac": plan.layout.bubble_frac,
        "memory_mib": plan.layout.memory_bytes / MIB,
        "chunks": plan.layout.num_chunks,
        "forward_s": [cost.forward_s for cost in plan.layer_costs[1:-1]],
        "backward_s": [cost.backward_s for cost in plan.layer_costs[1:-1]],
        "layouts": [
            (one.num_stages, one.num_shards, one.step_s, one.step_bytes) for one in plan.layouts
        ],
    }


def use_csr(module: NodeClassifier, data: Data) -> None:
    """Give PyG its best route."""
    data.edge_index = normalised_csr(data)
    for conv in module.net.convs:  # type: ignore[union-attr]
        assert isinstance(conv, GCN2Conv | GCNConv)
        conv.normalize = False


def normalised_csr(data: Data) -> Tensor:
    """Return the transposed adjacency matrix, self-loops and weights as GCN's: PyG's best route."""
    edges, weights = gcn_norm(data.edge_index, None, data.num_nodes, dtype=torch.float32)
    size = (data.num_nodes, data.num_nodes)
    return torch.sparse_coo_tensor(edges.flip(0), weights, size).coalesce().to_sparse_csr()


def make_parser() -> argparse.ArgumentParser:
    def flag(text: str) -> bool:
        return text == "True"

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--mode", choices=["pipe", "plan", "link", *PYG], default="pipe")
    add("--model", choices=list(MODELS), default="gcnii")
    add("--dataset", default="synthetic")
    add("--root", default=os.environ.get("GNNPIPE_DATA"))
    add("--stages", type=int, default=1)
    add("--graph-parallel", type=int, default=1)
    add("--hosts", type=int, default=1, help="each runs one of the processes")
    add("--chunks", type=lambda text: text if text == "auto" else int(text), default=8)
    add("--staleness", choices=get_args(StalenessName), default="drift")
    add("--validate", type=flag, default=False, help="after every step")
    add("--balance", choices=["measured", "uniform"], default="measured")
    add("--halo-codec", type=parse_codecs, default="fp32", help="or two: of rows, of gradients")
    add("--cut-codec", type=parse_codecs, default="fp32", help="the same")
    add("--async-halo", type=flag, default=False)
    add("--repeat-encoder", choices=["auto", "True", "False"], default="auto")
    add("--weights", choices=["whole", "staged"], default="whole")
    add("--layers", type=int, default=16)
    add("--hidden", type=int, default=128)
    add("--warm", type=int, default=NUM_WARM_STEPS, help="steps that are not measured")
    add("--steps", type=int, default=5)
    add("--nodes", type=int, default=NUM_NODES)
    add("--edges", type=int, default=NUM_EDGES)
    add("--inside", type=float, default=INSIDE_FRAC, help="share of edges inside a block")
    add("--features", type=int, help="keep so many of the data set's")
    add("--undirected", type=flag, default=False, help="add each edge's reverse")
    add("--link-gbit", type=float, default=10.0)
    add("--matmul", choices=MATMUL, default="highest", help="torch.set_float32_matmul_precision")
    add("--start-method", choices=["popen", "fork"], default="popen", help="fork shares the data")
    add("--message-us", type=float)
    add("--recompute", type=flag, default=False)
    add("--histories", choices=["float32", "bfloat16"])
    add("--cuda-graphs", type=flag, default=False)
    add("--exact-in-chunks", type=flag, default=False)
    add("--memory-gib", type=float)
    add("--history-device", help="of rows; else that of the layers")
    add("--table-folder", help="of files for histories and inputs of layers; else memory")
    add("--accelerator", choices=["cpu", "gpu"], default="cpu")
    add("--precision", default="32-true", help="of the Trainer")
    add("--graph", help="a file, or a prepared folder, instead of the synthetic one")
    add("--partition", default="metis")
    add("--turn", help="write this file before the first step, and wait until it is gone")
    return parser


def parse_codecs(text: str) -> CodecOption:
    """Return the name of a codec, or two of them: "int1,bf16"."""
    names = cast(list[CodecName], text.split(","))
    if not set(names) <= set(get_args(CodecName)) or len(names) > 2:
        raise argparse.ArgumentTypeError(f"one or two of {', '.join(get_args(CodecName))}")
    return names[0] if len(names) == 1 else (names[0], names[1])


def make_data(options: argparse.Namespace) -> Data:
    if options.graph and Path(options.graph).is_dir():
        return FullGraphDataModule(options.graph).data
    if options.graph:
        data = torch.load(options.graph, weights_only=False)
    else:
        data = synthetic(options) if options.dataset == "synthetic" else public(options)
    if options.undirected:
        data.edge_index = to_undirected(data.edge_index, num_nodes=data.num_nodes)
    if options.mode in ("sorted", "checkpointed"):
        data.edge_index = data.edge_index[:, data.edge_index[1].argsort()]
    return data


def public(options: argparse.Namespace) -> Data:
    data = FullGraphDataModule(load_graph(options.dataset, options.root)).data  # one split
    assert data.x is not None
    if options.features is not None:
        data.x = data.x[:, : options.features].clone()
    return data


def synthetic(options: argparse.Namespace) -> Data:
    torch.manual_seed(0)
    num_nodes = options.nodes
    edges = make_edges(num_nodes, options.edges, inside_frac=options.inside)
    is_train = torch.rand(num_nodes) < 0.5
    return Data(
        x=torch.randn(num_nodes, options.hidden),
        edge_index=edges,
        y=torch.randint(NUM_CLASSES, (num_nodes,)),
        train_mask=is_train,
        val_mask=~is_train,
        test_mask=~is_train,
    )


def make_module(options: argparse.Namespace, data: Data) -> NodeClassifier:
    torch.manual_seed(0)
    assert isinstance(data.y, Tensor)
    num_classes = int(data.y.max()) + 1
    net = MODELS[options.model](data.num_features, options.hidden, num_classes, options.layers, 0.0)
    return NodeClassifier(net, num_classes)


def make_strategy(options: argparse.Namespace) -> GNNPipeStrategy:
    return GNNPipeStrategy(
        num_stages="auto" if options.graph_parallel == 1 else options.stages,
        graph_parallel=options.graph_parallel,
        num_chunks=options.chunks,
        staleness=options.staleness,
        balance=options.balance,
        halo_codec=options.halo_codec,
        cut_codec=options.cut_codec,
        async_halo=options.async_halo,
        repeat_encoder={"True": True, "False": False}.get(options.repeat_encoder, "auto"),
        weights=options.weights,
        start_method=options.start_method,
        recompute=options.recompute,
        history_dtype=options.histories,
        history_device=options.history_device,
        table_folder=options.table_folder,
        cuda_graphs=options.cuda_graphs,
        exact_in_chunks=options.exact_in_chunks,
        memory_gib=options.memory_gib,
        partition=options.partition,
    )


def make_trainer(options: argparse.Namespace, callback: L.Callback, num_steps: int) -> L.Trainer:
    """Return a Trainer that makes steps and nothing else."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return L.Trainer(
        accelerator=options.accelerator,
        precision=options.precision,
        devices=options.stages * options.graph_parallel // options.hosts,
        num_nodes=options.hosts,
        strategy=make_strategy(options) if options.mode == "pipe" else "auto",
        max_epochs=num_steps,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=1 if options.validate else 0,
        num_sanity_val_steps=0,
    )


def make_source(options: argparse.Namespace, data: Data) -> Any:
    """Return what feeds the graph to the Trainer."""
    if options.mode != "csr":
        is_folder = options.graph and Path(options.graph).is_dir()
        return FullGraphDataModule(options.graph if is_folder else data)
    whole: Any = [data]  # a data module expects 'edge_index'
    return DataLoader(whole, batch_size=1, collate_fn=lambda batch: batch[0])


def wait_for_turn(turn: Path) -> None:
    """Say that the set-up is done, and wait until the steps may begin."""
    turn.touch()
    parent = os.getppid()
    while turn.exists():
        if os.getppid() != parent:
            sys.exit("the program that measures is gone")
        time.sleep(0.01)


def reset_peak() -> None:
    """Let the kernel count the peak of this process's memory from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Return the peak resident memory since `reset_peak`, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()

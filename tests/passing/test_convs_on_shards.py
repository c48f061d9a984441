"""P4 on the graph axis: every layer that is exact on chunks is so on chunks split over shards."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_geometric.nn as gnn
from torch import nn
from torch_geometric.nn.conv import spline_conv

from lightning_gnnpipe.errors import UnsupportedError
from tests.helpers.convs import CASES, ConvCase, ConvNet, D, attributed
from tests.helpers.engines import one_process_engine
from tests.helpers.reference import StaleOracle
from tests.helpers.splines import spline_basis, spline_weighting
from tests.passing.test_convs import (
    OWN,
    PARTITION,
    assert_same,
    assert_step,
    make_batch,
    move,
    next_order,
)

pytestmark = pytest.mark.filterwarnings("ignore:We do not recommend using the non-optimized CPU")

NUM_SHARDS, NUM_TURNS = 2, 8
REFUSED = {"HANConv"}  # takes a mean over all nodes
UPSTREAM = [  # not linear, and read values of edges that start in the chunk
    ConvCase(
        "GINEConv upstream",
        lambda: gnn.GINEConv(nn.Linear(D, D), edge_dim=3, flow="target_to_source"),
        attributed,
    ),
    ConvCase(
        "GATConv upstream",
        lambda: gnn.GATConv(D, D, edge_dim=3, add_self_loops=False, flow="target_to_source"),
        attributed,
    ),
    ConvCase(
        "GATConv flipped",
        lambda: gnn.GATConv(D, D, edge_dim=3, add_self_loops=False),
        lambda conv, x, edges, batch: conv(x, edges.flip(0), batch.edge_attr),
    ),
]


def check(case: ConvCase, rank: int) -> None:
    torch.manual_seed(0)
    batch = make_batch(case=case)
    net, inputs = ConvNet(case, batch), list(batch.values())
    oracle = StaleOracle(net, PARTITION)
    engine = one_process_engine(net, partition=PARTITION, rank=rank, num_shards=NUM_SHARDS)
    if case.conv in REFUSED:
        with pytest.raises(UnsupportedError, match=f"graph_parallel.*{case.conv}"):
            engine.forward((), batch)
        return
    assert_step(engine, batch, net, oracle.exact(*inputs))
    move(net, 0.1)
    assert_step(engine, batch, net, oracle.chunked(*inputs, order=next_order(engine)))
    with torch.no_grad():
        assert_same(engine.forward((), batch), net(*inputs))


def run_rank(rank: int, folder: str, turn: int) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    spline_conv.spline_basis, spline_conv.spline_weighting = spline_basis, spline_weighting
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_SHARDS
    )
    failed = []
    for case in (*CASES, *OWN, *UPSTREAM)[turn::NUM_TURNS]:
        try:
            check(case, rank)
        except Exception:
            failed.append(f"{case.name}: {traceback.format_exc()[-1500:]}")
        dist.barrier()  # a failure on one rank is one on both, or a timeout
    dist.destroy_process_group()
    assert not failed, "\n".join(failed)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_p4_convs_are_exact_on_shards(turn: int, tmp_path: Path) -> None:
    """Each turn has other layers: there are several of each kind."""
    mp.start_processes(run_rank, (str(tmp_path), turn), nprocs=NUM_SHARDS, start_method="fork")

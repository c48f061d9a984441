"""Sums over some of the stages: who takes part, what they get, what it costs."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_gnnpipe.comm import Meter, Transport, World, sum_along_pipe
from lightning_gnnpipe.errors import PeerError

TIMEOUT = timedelta(seconds=2)


def start(rank: int, folder: str, num_stages: int, num_shards: int, stages: list[int]) -> None:
    """Sum twice over `stages`, the second time over the first and last stage alone."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_stages * num_shards)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_stages * num_shards)
    dist.barrier()  # a rank that is left out would leave while others still connect to it
    cpu = torch.device("cpu")
    world, totals = World(rank, num_stages * num_shards, cpu, TIMEOUT), []
    transport = Transport(world, (num_stages, num_shards), Meter())
    for number, some in enumerate((stages, [stages[0], stages[-1]])):
        own = torch.tensor([0.1 * 3**rank, 1.0], dtype=torch.float64)
        if transport.mesh.stage in some:
            totals.append(sum_along_pipe(transport, own, some, "tied_grad", number, num_flags=1))
        assert own[1] == 1  # as it was
    torch.save((totals, transport.meter.read()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("num_stages", "num_shards", "stages"),
    [(2, 1, [0, 1]), (4, 1, [0, 2, 3]), (4, 1, [1, 2]), (2, 2, [0, 1])],
)
def test_ranks_of_some_stages_get_the_same_bits(
    num_stages: int, num_shards: int, stages: list[int], tmp_path: Path
) -> None:
    num_ranks = num_stages * num_shards
    args = (str(tmp_path), num_stages, num_shards, stages)
    mp.start_processes(start, args, nprocs=num_ranks, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]
    sums = [stages, [stages[0], stages[-1]]]
    for some in sums:
        taking = [rank for rank in range(num_ranks) if rank // num_shards in some]
        totals = [found[rank][0].pop(0) for rank in taking]
        expected = sum(0.1 * 3**rank for rank in taking)
        assert totals[0][0] == pytest.approx(expected) and totals[0][1] == len(taking)
        assert all(torch.equal(total, totals[0]) for total in totals)
    # as much as a ring of all that take part; the second number is a flag
    received = sum(2 * (len(some) * num_shards - 1) * 8 for some in sums)
    for kind in ("tied_grad", "control"):
        assert sum(counts.get(kind, 0) for _, counts in found) == received
    left_out = [found[rank][1] for rank in range(num_ranks) if rank // num_shards not in stages]
    assert all(counts == {} for counts in left_out)


def wait_alone(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    transport = Transport(World(rank, 2, torch.device("cpu"), TIMEOUT), (2, 1), Meter())
    if rank == 0:
        with pytest.raises(PeerError, match="wait for tied_grad data"):
            sum_along_pipe(transport, torch.ones(1), [0, 1], "tied_grad", 0)
    else:
        time.sleep(4)
    dist.destroy_process_group()


def test_p7_a_sum_ends_with_the_timeout(tmp_path: Path) -> None:
    mp.start_processes(wait_alone, (str(tmp_path),), nprocs=2, start_method="fork")

"""Messages between two processes: unequal sizes, overlap, bytes, errors and timeouts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_gnnpipe._compat_torch import set_group_timeout
from lightning_gnnpipe.comm import Label, Meter, Transport, World
from lightning_gnnpipe.errors import GraphError, PeerError, UnsupportedError

SIZES = [(3, 2), (1, 2), (0, 2), (7, 2)]


def start(rank: int, folder: str, work: Callable[[Transport, Path], None]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    timeout = timedelta(seconds=2)
    set_group_timeout(timeout)
    transport = Transport(World(rank, 2, torch.device("cpu"), timeout), (2, 1), Meter())
    try:
        work(transport, Path(folder))
    finally:
        dist.destroy_process_group()


def run(work: Callable[[Transport, Path], None], folder: Path) -> None:
    mp.start_processes(start, (str(folder), work), nprocs=2, start_method="fork")


def exchange(transport: Transport, folder: Path) -> None:
    """Chunks of unequal, and empty, sizes; received in another order than they were posted."""
    if transport.mesh.is_first:
        for chunk, size in enumerate(SIZES):
            tensors = [torch.full(size, chunk), torch.ones(2).double()]
            transport.send(1, Label("forward", chunk), tensors)
        transport.flush()
        assert transport.meter.read() == {}
        return
    for chunk, size in enumerate(SIZES):
        buffers = [torch.empty(size, dtype=torch.int64), torch.empty(2).double()]
        transport.post_receive(0, Label("forward", chunk), buffers)
    for chunk in (3, 0, 2, 1):
        first, second = transport.wait_receive(Label("forward", chunk))
        assert first.shape == SIZES[chunk] and bool((first == chunk).all())
        assert second.sum() == 2
    assert transport.meter.read() == {"forward": 11 * 2 * 8 + 4 * 2 * 8}


def test_unequal_chunks_arrive_whole(tmp_path: Path) -> None:
    run(exchange, tmp_path)


def leave_behind(transport: Transport, folder: Path) -> None:
    """A run ends with a message on its way; the next one, of the same form, is the one received."""
    label = Label("forward", 0)
    if transport.mesh.is_first:
        transport.send(1, label, [torch.zeros(3)])
    before = threading.active_count(), signal.set_wakeup_fd(-1)
    transport.begin_run(lambda: False)
    assert threading.active_count() == before[0] + 1
    transport.end_run()
    assert (threading.active_count(), signal.set_wakeup_fd(-1)) == before
    if transport.mesh.is_first:
        transport.send(1, label, [torch.ones(3)])
        transport.flush()
        return
    transport.post_receive(0, label, [torch.empty(3)])
    assert transport.wait_receive(label)[0].tolist() == [1.0, 1.0, 1.0]


def test_what_a_failed_run_has_sent_is_not_for_the_next(tmp_path: Path) -> None:
    run(leave_behind, tmp_path)


def share(transport: Transport, folder: Path) -> None:
    stage = transport.mesh.stage
    local = {"a": torch.zeros(2)} if stage == 0 else {"b": torch.ones(3, 1)}
    shapes = {"a": (torch.Size([2]), torch.float32), "b": (torch.Size([3, 1]), torch.float32)}
    found = transport.share_tensors({"a": 0, "b": 1}, local, shapes)
    assert found["a"].tolist() == [0, 0] and found["b"].sum() == 3
    total = torch.tensor([1.0 + stage])
    transport.all_reduce(total, "tied_grad")
    assert total.item() == 3
    assert transport.meet("meet", [stage, 7]) == [[0, 7], [1, 7]]
    assert transport.all_gather_objects({"s": stage}) == [{"s": 0}, {"s": 1}]
    assert transport.run_on_first(lambda: stage) == 0


def test_collectives(tmp_path: Path) -> None:
    run(share, tmp_path)


def fails_on_first(transport: Transport, folder: Path) -> None:
    def work() -> None:
        raise GraphError("found on rank 0")

    with pytest.raises(GraphError, match="found on rank 0"):
        transport.run_on_first(work)

    def fail() -> None:
        raise MemoryError("no memory on rank 0")

    with pytest.raises(MemoryError if transport.mesh.is_first else PeerError, match="no memory"):
        transport.run_on_first(fail)
    with pytest.raises(UnsupportedError, match="rank 0 wants to go; rank 1 wants to stay"):
        transport.meet("go" if transport.mesh.is_first else "stay", [3])


def test_an_error_of_the_first_rank_is_raised_on_all(tmp_path: Path) -> None:
    run(fails_on_first, tmp_path)


def waits_in_vain(transport: Transport, folder: Path) -> None:
    if transport.mesh.is_first:
        time.sleep(5)
        return
    transport.post_receive(0, Label("forward", 4), [torch.empty(3)])
    started = time.monotonic()
    with pytest.raises(PeerError, match=r"wait for forward data of chunk 4.*within 2 s"):
        transport.wait_receive(Label("forward", 4))
    assert time.monotonic() - started < 4


def test_p7_a_wait_ends_with_the_timeout(tmp_path: Path) -> None:
    run(waits_in_vain, tmp_path)


def meets_in_vain(transport: Transport, folder: Path) -> None:
    if transport.mesh.is_first:
        time.sleep(5)
        return
    with pytest.raises(PeerError, match=r"could not meet: .*within 2 s"):
        transport.meet("meet")


def test_p7_a_collective_ends_with_the_timeout(tmp_path: Path) -> None:
    run(meets_in_vain, tmp_path)


def test_one_process_needs_no_group() -> None:
    world = World(0, 1, torch.device("cpu"), timedelta(seconds=1))
    transport = Transport(world, (1, 1), Meter())
    assert not transport.world.is_distributed
    assert transport.mesh.is_first and transport.mesh.is_last
    assert transport.meet("meet", [3]) == [[3]]
    assert transport.broadcast_object("x") == "x"
    tensor = torch.ones(2)
    transport.all_reduce(tensor, "tied_grad")
    transport.broadcast(tensor, 0, "output")
    assert transport.meter.read() == {}

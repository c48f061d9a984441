"""Messages and sums between processes: unequal sizes, bytes, errors and timeouts; the mesh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_gnnpipe._compat_torch import set_group_timeout
from lightning_gnnpipe.comm import Label, Mesh, Meter, Transport, World
from lightning_gnnpipe.comm.watch import Watch
from lightning_gnnpipe.errors import GraphError, PeerError, UnsupportedError

SIZES = [(3, 2), (1, 2), (0, 2), (7, 2)]
CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=2)

Work = Callable[[Transport], None]


def start(rank: int, folder: str, shape: tuple[int, int], work: Work) -> None:
    torch.set_num_threads(1)
    num_ranks = shape[0] * shape[1]
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    transport = Transport(World(rank, num_ranks, CPU, TIMEOUT), shape, Meter())
    dist.barrier()  # a rank that is left out would leave while others still connect to it
    set_group_timeout(TIMEOUT)
    try:
        work(transport)
    finally:
        dist.destroy_process_group()


def run(work: Work, folder: Path, shape: tuple[int, int] = (2, 1)) -> None:
    """Run `work` on each rank of so many stages and shards."""
    args = (str(folder), shape, work)
    mp.start_processes(start, args, nprocs=shape[0] * shape[1], start_method="fork")


def test_ranks_are_assigned_to_replicas_then_stages_then_shards() -> None:
    """Three replicas of two stages of two shards."""
    places = list(product(range(3), range(2), range(2)))
    for rank, (replica, stage, shard) in enumerate(places):
        mesh = Mesh(rank, num_stages=2, num_shards=2, num_replicas=3)
        assert (mesh.replica, mesh.stage, mesh.shard) == (replica, stage, shard)
        assert mesh.is_last == (stage == 1)
        assert mesh.rank_of(1 - stage) == places.index((replica, 1 - stage, shard))
        assert mesh.rank_of(stage, 1 - shard) == places.index((replica, stage, 1 - shard))


def exchange(transport: Transport) -> None:
    """Chunks of unequal, and empty, sizes; received in another order than they were posted."""
    if transport.mesh.stage == 0:
        for chunk, size in enumerate(SIZES):
            tensors = [torch.full(size, chunk), torch.ones(2).double()]
            transport.send(1, Label("forward", chunk), tensors)
        transport.flush()
        assert transport.meter == {}
        return
    for chunk, size in enumerate(SIZES):
        buffers = [torch.empty(size, dtype=torch.int64), torch.empty(2).double()]
        transport.post_receive(0, Label("forward", chunk), buffers)
    for chunk in (3, 0, 2, 1):
        first, second = transport.wait_receive(Label("forward", chunk))
        assert first.shape == SIZES[chunk] and bool((first == chunk).all())
        assert second.sum() == 2
    assert transport.meter == {"forward": 11 * 2 * 8 + 4 * 2 * 8}


def leave_behind(transport: Transport) -> None:
    """A run ends with a message on its way; the next one, of the same form, is the one received."""
    label = Label("forward", 0)
    if transport.mesh.stage == 0:
        transport.send(1, label, [torch.zeros(3)])
    before = threading.active_count()
    transport.begin_run()
    assert threading.active_count() == before + 1
    transport.watch.stop()
    assert threading.active_count() == before
    if transport.mesh.stage == 0:
        transport.send(1, label, [torch.ones(3)])
        transport.flush()
        return
    transport.post_receive(0, label, [torch.empty(3)])
    assert transport.wait_receive(label)[0].tolist() == [1.0, 1.0, 1.0]


def share(transport: Transport) -> None:
    stage = transport.mesh.stage
    found = [torch.full((2,), float(stage)), torch.tensor(stage), torch.ones(3, 1)]
    found.append(torch.tensor([stage], dtype=torch.int16))
    transport.broadcast_all([*found, torch.eye(2 + stage).to_sparse_csr()], 1)
    assert [one.tolist() for one in found] == [[1.0, 1.0], 1, [[1.0]] * 3, [1]]
    total = torch.tensor([1.0 + stage])
    transport.all_reduce(total, "weight_grad")
    assert total.item() == 3
    assert transport.meet("meet", [stage, 7]) == [[0, 7], [1, 7]]
    assert transport.all_gather_objects({"s": stage}) == [{"s": 0}, {"s": 1}]
    assert transport.run_on_first(lambda: stage) == 0


def fail_on_first(transport: Transport) -> None:
    """An error of the first rank is raised on all; so is that ranks want different things."""

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(GraphError, match="found on rank 0"):
        transport.run_on_first(lambda: fail(GraphError("found on rank 0")))
    with pytest.raises(MemoryError if transport.mesh.stage == 0 else PeerError, match="no memory"):
        transport.run_on_first(lambda: fail(MemoryError("no memory on rank 0")))
    with pytest.raises(UnsupportedError, match="rank 0 wants to go; rank 1 wants to stay"):
        transport.meet("go" if transport.mesh.stage == 0 else "stay", [3])


@pytest.mark.parametrize("work", [exchange, leave_behind, share, fail_on_first])
def test_two_ranks(work: Work, tmp_path: Path) -> None:
    run(work, tmp_path)


def hold_all_groups(transport: Transport) -> None:
    assert {one.group for one in transport.axes} <= {*transport.axes.groups, None}
    assert transport.pipe.members.group not in (None, transport.members.group)


def test_a_failure_breaks_the_groups_of_all_axes(tmp_path: Path) -> None:
    run(hold_all_groups, tmp_path, (2, 2))


def test_a_rank_counts_once_as_one_that_has_heard_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, watch, store = [], Watch(0, 2), dist.HashStore()
    monkeypatch.setattr(watch, "_store", store)
    monkeypatch.setattr(watch, "_prefix", "run/")
    store.set("run/cause", "Rank 1 failed")
    look = watch._look

    def look_slowly() -> str | None:
        found.append(look())
        time.sleep(0.2)
        return found[-1]

    monkeypatch.setattr(watch, "_look", look_slowly)
    threads = [threading.Thread(target=watch.read) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert store.add("run/heard", 0) == 1 and found == ["Rank 1 failed"]


def receive(transport: Transport) -> None:
    transport.post_receive(0, Label("forward", 4), [torch.empty(3)])
    transport.wait_receive(Label("forward", 4))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (receive, r"wait for forward data of chunk 4.*within 2 s"),
        (lambda transport: transport.meet("meet"), r"could not meet: .*within 2 s"),
        (
            lambda transport: transport.pipe.broadcast(torch.ones(1), 0, "weight_grad"),
            "broadcast weight_grad data from rank 0",
        ),
    ],
)
def test_p7_a_wait_ends_with_the_timeout(wait: Work, text: str, tmp_path: Path) -> None:
    def work(transport: Transport) -> None:
        if transport.mesh.stage == 0:
            time.sleep(5)
            return
        started = time.monotonic()
        with pytest.raises(PeerError, match=text):
            wait(transport)
        assert time.monotonic() - started < 4

    run(work, tmp_path)

"""What is taken from a step's events: phases, waits, bubble share; and the peak of memory."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch

from lightning_gnnpipe.callbacks.timeline import describe_step
from lightning_gnnpipe.chunks import TraceEvent, phases
from lightning_gnnpipe.chunks import step_trace as memory
from lightning_gnnpipe.chunks.step_trace import RankRecord, merge_stats, peak_memory_bytes
from lightning_gnnpipe.comm import Transport
from tests.helpers.observed import NUM_LAYERS, make_data, make_module, make_trainer
from tests.helpers.steps import make_stats


def test_waits_are_the_time_of_both_phases_without_computing() -> None:
    """Forward 3 slots, the loss 1, backward 3: stage 0 idles for 3 of 6, stage 1 for 2.

    stage 0   F0 .. .. .. .. B1 B0
    stage 1   .. F0 F1 .. B1 B0 ..
    """
    stats = make_stats("F0 .. .. .. .. B1 B0", ".. F0 F1 .. B1 B0 ..", bytes_by_kind={"forward": 3})
    assert phases(stats.events) == [(0, 300), (400, 700)]
    assert stats.wait_s == pytest.approx((3e-4, 2e-4))
    assert stats.bubble_frac == pytest.approx(5 / 12)
    assert stats.bytes_by_kind == {"forward": 6}
    assert stats.peak_memory_bytes == (2**20, 2**21)


def test_a_wait_within_an_action_counts() -> None:
    """Rank 0 computes for 3 slots of 4 and waits for its shard for half a slot of them."""
    whole = (
        TraceEvent(0, "forward", 0, 100, 300, wait_us=50),
        TraceEvent(0, "backward", 0, 400, 500),
    )
    other = (
        TraceEvent(1, "forward", 0, 100, 300),
        TraceEvent(1, "backward", 0, 400, 500, wait_us=25),
    )
    records = [RankRecord(list(events), {}, 0) for events in (whole, other)]
    stats = merge_stats(records, 1, 1, is_exact=False)
    assert phases(stats.events) == [(0, 200), (300, 400)]
    assert stats.wait_s == pytest.approx((5e-5, 2.5e-5))
    assert stats.bubble_frac == pytest.approx(75 / 600)


def test_waiting_for_a_slow_shard_is_no_computing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Shard 1 is late at each exchange: shard 0 has waited for that long, shard 1 has not."""
    late_s, exchange = 0.15, Transport.exchange  # much longer than a busy machine holds up a rank

    def late(transport: Transport, *args: Any) -> Any:
        if transport.world.rank == 1:
            time.sleep(late_s)
        return exchange(transport, *args)

    class Waits(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            stats = trainer.strategy.collect_stats()
            if trainer.is_global_zero:
                events = [event for event in stats.events if event.rank == 0]
                torch.save((stats.wait_s, [e.wait_us for e in events]), tmp_path / "waits.pt")

    monkeypatch.setattr(Transport, "exchange", late)
    options = {"strategy": {"graph_parallel": 2}, "limit_val_batches": 0, "max_epochs": 2}
    make_trainer(2, 2, Waits(), **options).fit(make_module(), make_data())
    (first, second), waited_us = torch.load(tmp_path / "waits.pt", weights_only=True)
    waits_s = NUM_LAYERS * 2 * 2 * late_s  # layers, chunks, directions
    assert len(waited_us) == 4 and min(waited_us) > 0.9 * NUM_LAYERS * late_s * 1e6
    assert first > 0.9 * waits_s
    assert second < first - 0.5 * waits_s


def test_ranks_are_named_after_their_places() -> None:
    stats = make_stats("F0 B0", "F0 B0")
    assert stats.rank_names() == [["stage 0"], ["stage 1"]]
    shards = replace(stats, num_stages=1, num_shards=2)
    assert shards.rank_names() == [["stage 0", "shard 0"], ["stage 0", "shard 1"]]
    replicas = replace(stats, num_replicas=2)
    assert replicas.rank_names() == [
        [f"replica {replica}", f"stage {stage}"] for replica in range(2) for stage in range(2)
    ]
    assert describe_step(replicas).startswith("2 replicas of 2 stages, 2 chunks, ")


@pytest.mark.parametrize("has_status", [True, False])
def test_the_peak_grows_with_what_was_held(
    has_status: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not has_status:
        monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    before, more = peak_memory_bytes(torch.device("cpu")), 2**27  # too much for a freed place
    size = before - psutil.Process().memory_info().rss + more
    held = torch.ones(size, dtype=torch.uint8)
    assert before < peak_memory_bytes(torch.device("cpu")) < before + 2 * more
    del held

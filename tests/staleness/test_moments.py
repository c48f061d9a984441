"""Statistics of rows whose number changes from step to step, as that of dropped edges does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from lightning_gnnpipe.staleness import MomentStore, StepOrder
from lightning_gnnpipe.staleness.moments import VAR


@pytest.mark.parametrize("num_shards", [1, 2])
def test_statistics_are_of_this_steps_rows(num_shards: int) -> None:
    torch.manual_seed(0)
    times = num_shards  # another shard has equal rows
    store = MomentStore(2, None if times == 1 else lambda own: own * times)
    order = StepOrder(2)
    store.keep("norm", torch.randn(10, 3, dtype=torch.float64), [6, 4])
    for counts in ((6, 4), (6, 4), (6, 4), (5, 4), (5, 4), (5, 4), (5, 0), (2, 4)):
        moments: Any = store.calls["norm"]
        store.begin_step(order)
        moments.is_of_messages = True
        parts = [torch.randn(count, 3, dtype=torch.float64) + 1 for count in counts]
        for chunk, part in enumerate(parts):
            moments.add(chunk, part, 1e-5)
        mean, var, number = moments.present()
        every = torch.cat(parts)
        assert_close(mean, every.mean(0), rtol=0, atol=1e-12)
        assert_close(var, every.var(0, unbiased=False), rtol=0, atol=1e-12)
        assert int(number) == times * sum(counts)


def test_rows_that_stay_keep_their_small_variance() -> None:
    store = MomentStore(2)
    rows = torch.randn(10, 3, dtype=torch.float64) * torch.tensor([1.0, 1e-4, 0.0])
    store.keep("norm", rows, [6, 4])
    moments = store.calls["norm"]
    store.begin_step(StepOrder(2))
    for chunk, part in enumerate(rows.split([6, 4])):
        moments.add(chunk, part, 0.0)
        found = moments.numbers[chunk][VAR]
        assert_close(found[:2], rows.var(0, unbiased=False)[:2], rtol=1e-12, atol=0)
        assert 0 < found[2] < 1e-11  # a channel may be constant

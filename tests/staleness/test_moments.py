"""Statistics of rows over shards whose number of rows changes, as that of dropped edges does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_gnnpipe.staleness import MomentStore, StepOrder


class Peer:
    """The sum over this shard and another one with the same rows in reverse."""

    def sum(self, own: Tensor) -> Tensor:
        return own * 2


def test_shards_take_the_number_of_this_steps_messages() -> None:
    torch.manual_seed(0)
    store, counts, peer = MomentStore(2), (6, 4), Peer()
    rows = torch.randn(20, 3, dtype=torch.float64)
    store.keep("norm", rows, [2 * count for count in counts])
    for counts in ((6, 4), (5, 0), (2, 4)):
        moments: Any = store.calls["norm"]
        moments.is_of_messages = True
        store.begin_step(StepOrder(2))
        parts = [torch.randn(count, 3, dtype=torch.float64) + 1 for count in counts]
        for chunk, part in enumerate(parts):
            moments.add(chunk, part, 1e-5, peer)
        mean, var, number = moments.present()
        every = torch.cat(parts)
        assert_close(mean, every.mean(0), rtol=0, atol=1e-12)
        assert_close(var, every.var(0, unbiased=False), rtol=0, atol=1e-12)
        assert int(number) == 2 * sum(counts)

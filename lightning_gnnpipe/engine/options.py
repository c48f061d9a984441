"""What the engine is told at the start of a run."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gnnpipe.comm import MessageOptions
from lightning_gnnpipe.engine.graph import ChunkOptions
from lightning_gnnpipe.engine.model import Balance
from lightning_gnnpipe.history import HistoryOptions

_EXACT = MessageOptions()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Fixed for a run.

    Attributes:
        chunks: How graphs are cut.
        histories: How histories are kept, and whether activations are not.
        shuffle_chunks: Draw a new chunk order each step.
        balance: How layers are dealt out.
        seed: Seed of chunk orders and of random numbers in layers; equal on all ranks.
        is_fitting: Whether this is a run that trains.
        self_check: Whether a new trace is tried out on a small graph.
        messages: How ranks send rows to each other.
    """

    chunks: ChunkOptions
    histories: HistoryOptions
    shuffle_chunks: bool
    balance: Balance
    seed: int
    is_fitting: bool
    self_check: bool = True
    messages: MessageOptions = _EXACT

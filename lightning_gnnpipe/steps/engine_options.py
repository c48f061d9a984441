"""What the engine is told at the start of a run."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gnnpipe.codecs import MessageOptions
from lightning_gnnpipe.staleness import HistoryOptions
from lightning_gnnpipe.steps.modes import Balance, Splitting
from lightning_gnnpipe.steps.partitioner import ChunkOptions
from lightning_gnnpipe.types import OrderName, RepeatOption, ScheduleName

_EXACT = MessageOptions()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Fixed for a run.

    Attributes:
        chunks: How graphs are cut.
        histories: How histories are kept, and whether activations are not.
        chunk_order: How the order of chunks is drawn for each step.
        balance: How layers are assigned.
        seed: Seed of chunk orders and of random numbers in layers; equal on all ranks.
        is_fitting: Whether this is a run that trains.
        guards_loss: Whether a step is exact after the training loss has jumped.
        allows_changes: Whether rows may be read that were computed from other inputs.
        self_check: Whether a new trace is tried out on a small graph.
        messages: How ranks send rows to each other.
        repeat_encoder: Whether stages compute again what they can, rather than to receive it.
        schedule: In which order batches of graphs go forward and back.
        num_virtual: Stages of each rank, if there are several ranks.
    """

    chunks: ChunkOptions
    histories: HistoryOptions
    chunk_order: OrderName
    balance: Balance
    seed: int
    is_fitting: bool
    self_check: bool = True
    messages: MessageOptions = _EXACT
    repeat_encoder: RepeatOption = "auto"
    schedule: ScheduleName = "fill_drain"
    num_virtual: int = 1
    guards_loss: bool = True
    allows_changes: bool = False

    @property
    def splitting(self) -> Splitting:
        """How layers are assigned to stages."""
        return Splitting(self.balance, self.repeat_encoder, self.num_virtual)

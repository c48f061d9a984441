"""Options of the engine."""

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
    """Options of the engine, fixed for a run.

    Attributes:
        seed: Of chunk orders and of random numbers in layers; equal on all ranks.
        is_fitting: Whether the run trains.
        self_check: Whether a new trace is tested on a small graph.
        repeat_encoder: Whether stages recompute cheap values instead of receiving them.
        schedule: Of batches of graphs.
        num_virtual: Stages of each rank, if there are several ranks.
        guards_loss: Whether a jump of the training loss makes the next step exact.
        allows_changes: Whether steps may read histories of other inputs.
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

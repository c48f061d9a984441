"""What follows a training step: its statistics, and running statistics of norms."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from lightning_gnnpipe.chunks import PipelineStats, RankRecord, merge_stats, peak_memory_bytes
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.known_graphs import PlannedGraph
from lightning_gnnpipe.errors import ConfigError, Fallbacks
from lightning_gnnpipe.layers import tracks_statistics
from lightning_gnnpipe.stages import Layers
from lightning_gnnpipe.staleness import Staleness
from lightning_gnnpipe.steps.training import PassRecord

log = logging.getLogger(__name__)


class LastStep:
    """The record of the last finished training step."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.record: PassRecord | None = None

    def recount(self) -> None:
        """Add traffic after the step's backward."""
        if self.record is not None:
            self.record = replace(self.record, bytes_by_kind=dict(self._transport.meter))

    def stats(self) -> PipelineStats:
        """Return the step's statistics over all ranks; collective."""
        record, transport = self._record(), self._transport
        memory = peak_memory_bytes(transport.world.device)
        own = RankRecord(record.events, record.bytes_by_kind, memory)
        gathered = transport.everyone.all_gather_objects(own)
        mesh = transport.mesh
        return merge_stats(
            gathered, mesh.num_stages, record.num_chunks, record.is_exact, mesh.num_replicas
        )

    def staleness(self) -> dict[int, Staleness]:
        """Return the step's staleness by layer, over all ranks; collective."""
        merged: dict[int, Staleness] = {}
        for one in self._transport.all_gather_objects(self._record().staleness):
            for layer, staleness in one.items():
                merged.setdefault(layer, Staleness()).add(staleness)
        return dict(sorted(merged.items()))

    def _record(self) -> PassRecord:
        if self.record is None:
            raise ConfigError(
                expected="a finished training step",
                found="none in this run",
                remedy="Ask after one, while the run goes on.",
            )
        return self.record


class RunningStatistics:
    """Running statistics from pipelined steps, and their replacement in validation.

    In a pipelined step a norm sees embeddings of stale inputs. In a deep network they differ
    from exact embeddings, and the running statistics do not fit. So the next validation
    on the training input recomputes the statistics. `stale` has the names of such norms; it is
    equal on all ranks.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        self.stale: set[str] = set()
        self._fallbacks = Fallbacks(log, is_quiet=is_quiet)

    def note_pipelined(self, norms: Mapping[str, nn.Module]) -> None:
        self.stale |= {name for name, norm in norms.items() if tracks_statistics(norm)}

    @contextmanager
    def replaced(self, graph: PlannedGraph, layers: Layers) -> Iterator[None]:
        """Let one exact pass over `graph`, within the block, replace the statistics.

        A norm that is called several times in a pass has several statistics, so it is skipped.
        """
        names = {name for name in self.stale if layers.num_calls(name) == 1}
        graph.reading.replaced = names
        try:
            yield
        finally:
            graph.reading.replaced = ()
        self.stale -= names

    def warn(self) -> None:
        """Warn once if validation has not replaced some statistics."""
        if self.stale:
            self._fallbacks.tell(
                "The running statistics of '%s' and other norms come from pipelined steps, and no "
                "validation has recomputed them from exact embeddings. A deep network may evaluate "
                "much worse than it trains. Let fit() validate after its last epoch, with the "
                "inputs of training, without weight averaging, and with one call of each norm.",
                min(self.stale),
            )

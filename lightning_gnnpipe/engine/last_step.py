"""What there is to tell of the last training step, put together from all ranks."""

from __future__ import annotations

from dataclasses import replace

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.engine.trace import PipelineStats, merge_stats
from lightning_gnnpipe.engine.training import PassRecord
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history import Staleness


class LastStep:
    """The record of the last finished training step.

    Args:
        transport: The ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.record: PassRecord | None = None

    def recount(self) -> None:
        """Add what has travelled since its backward."""
        if self.record is not None:
            self.record = replace(self.record, bytes_by_kind=self._transport.meter.read())

    def stats(self) -> PipelineStats:
        """Return its figures; a collective call.

        Raises:
            ConfigError: If no step has finished.
        """
        record, transport = self._record(), self._transport
        own = record.of_rank(transport.world.device)
        gathered = transport.everyone.all_gather_objects(own)
        mesh, num_virtual = transport.mesh, record.num_virtual
        return merge_stats(
            gathered,
            mesh.num_stages * num_virtual,
            record.num_chunks,
            record.is_exact,
            mesh.num_replicas,
            num_virtual,
        )

    def staleness(self) -> dict[int, Staleness]:
        """Return its staleness by layer, over all ranks; a collective call.

        Raises:
            ConfigError: If no step has finished.
        """
        merged: dict[int, Staleness] = {}
        for one in self._transport.all_gather_objects(self._record().staleness):
            for layer, staleness in one.items():
                merged.setdefault(layer, Staleness()).add(staleness)
        return dict(sorted(merged.items()))

    def _record(self) -> PassRecord:
        if self.record is None:
            raise ConfigError(
                explain(
                    expected="a finished training step",
                    found="none in this run",
                    remedy="Ask after one, while the run goes on.",
                )
            )
        return self.record

"""Running statistics from pipelined steps, and their replacement in validation.

In a pipelined step a norm sees rows computed from stale inputs. In a deep network they differ from
the rows of exact evaluation, and the running statistics do not fit. So the next validation on the
training input recomputes the statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from lightning_gnnpipe.engine.histories import PlannedGraph
from lightning_gnnpipe.layers import tracks_statistics
from lightning_gnnpipe.stages import Layers

log = logging.getLogger(__name__)


class RunningStatistics:
    """Tracks norms with pipelined statistics: `stale`, names equal on every rank."""

    def __init__(self, names: Iterable[str] = (), *, is_quiet: bool) -> None:
        self.stale = set(names)
        self._is_quiet = is_quiet

    def note_pipelined(self, norms: Mapping[str, nn.Module]) -> None:
        """Mark the norms whose statistics a pipelined step updates."""
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
        if self.stale and not self._is_quiet:
            self._is_quiet = True
            log.warning(
                "The running statistics of '%s' and other norms come from pipelined steps, and no "
                "validation has replaced them by those of exact rows. A deep network may evaluate "
                "much worse than it trains. Let fit() validate after its last epoch, with the "
                "inputs of training, without weight averaging, and with one call of each norm.",
                min(self.stale),
            )

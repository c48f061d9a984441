"""Running statistics that pipelined steps have updated, and how validation replaces them.

In a pipelined step the rows that a norm sees come from stale inputs. In exact evaluation the rows
of a deep network are different, and running statistics do not fit them. So the next validation that
is given what training is given replaces the statistics by those of the rows that it computes.
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
    """The norms whose running statistics are those of pipelined steps.

    Args:
        names: Of the norms, in a run that goes on.
        is_quiet: Whether another rank warns.

    Attributes:
        stale: Names of the norms; the same on every rank.
    """

    def __init__(self, names: Iterable[str] = (), *, is_quiet: bool) -> None:
        self.stale = set(names)
        self._is_quiet = is_quiet

    def note_pipelined(self, norms: Mapping[str, nn.Module]) -> None:
        """Add those of `norms` that a pipelined step, with stale inputs, updates."""
        self.stale |= {name for name, norm in norms.items() if tracks_statistics(norm)}

    @contextmanager
    def replaced(self, graph: PlannedGraph, layers: Layers) -> Iterator[None]:
        """Let one exact pass over `graph`, within the block, replace them.

        A norm that is called several times in a pass has several statistics; it is left as it is.
        """
        names = {name for name in self.stale if layers.num_calls(name) == 1}
        graph.reading.replaced = names
        try:
            yield
        finally:
            graph.reading.replaced = ()
        self.stale -= names

    def warn(self) -> None:
        """Warn once if validation has not replaced some of them."""
        if self.stale and not self._is_quiet:
            self._is_quiet = True
            log.warning(
                "The running statistics of '%s' and other norms come from pipelined steps, and no "
                "validation has replaced them by those of exact rows. A deep network may evaluate "
                "much worse than it trains. Let fit() validate after its last epoch, with the "
                "inputs of training, without weight averaging, and with one call of each norm.",
                min(self.stale),
            )

"""Which inputs of training have histories: the first one, and each input that comes again.

    step     1      2      3      4      5      6        inputs a, b, c in turn
    input    a      b      c      a      b      c
             exact  exact  exact  stale  exact  exact    a is kept at once, b and c from here on

An input that is new in every step runs exactly, and costs no memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator

from lightning_gnnpipe.engine.histories import Histories
from lightning_gnnpipe.engine.identity import InputKey
from lightning_gnnpipe.engine.run_state import SavedHistories
from lightning_gnnpipe.fallbacks import Fallbacks

log = logging.getLogger(__name__)

_RANDOM = (
    "If they are new in every step, draw the random numbers in the module's forward, shaped like "
    "its tensors (dropout, torch.rand_like). For small augmentation there is "
    "GNNPipeStrategy(changing_inputs='allow'); with known labels among the inputs it leaks the "
    "hidden ones."
)
_SAMPLED = (
    "If each batch is another graph (NeighborLoader, dropped edges), no step overlaps: train on "
    "one device, or on the whole graph."
)

_MOST_KEPT = 32
_MOST_BYTES = 2 << 30
_MOST_SEEN = 1024


class KnownInputs:
    """Histories by the number of their input.

    Args:
        is_quiet: Whether another rank warns.

    Attributes:
        seen: The step in which each of the last inputs came last, by its number.
        last: What the last training step was given.
        saved: Histories of the run that goes on, until a step on their input takes them.
        num_saved_layers: Layers of that run.
        num_changed: Training steps that were exact because of what they were given.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        self.seen: OrderedDict[int, int] = OrderedDict()
        self.last: InputKey | None = None
        self.saved: dict[int, SavedHistories] = {}
        self.num_saved_layers = 0
        self.num_changed = 0
        self._kept: dict[int, Histories] = {}
        self._is_quiet = is_quiet
        self._fallbacks = Fallbacks(log, is_quiet=is_quiet)

    def __iter__(self) -> Iterator[Histories]:
        return iter(self._kept.values())

    def items(self) -> list[tuple[int, Histories]]:
        """Return the kept histories with the numbers of their inputs."""
        return list(self._kept.items())

    def get(self, number: int) -> Histories | None:
        """Return the histories of an input; None if it has none."""
        return self._kept.get(number)

    def keep(self, number: int, histories: Histories) -> None:
        """Keep the histories of an input from now on."""
        self._kept[number] = histories

    def admits(self, number: int, num_bytes: int) -> bool:
        """Whether to keep histories for an input that has none; may drop the oldest histories.

        Args:
            number: Of the input.
            num_bytes: Bytes of the largest histories on any rank.
        """
        if number in self.saved or not self._kept:
            return True
        if number not in self.seen:
            return False
        most = max(1, min(_MOST_KEPT, _MOST_BYTES // max(num_bytes, 1)))
        if len(self._kept) + len(self.saved) < most:
            return True
        oldest = min(self._kept, key=lambda one: self._kept[one].last_step)
        if self._kept[oldest].last_step < self.seen[number]:
            self._kept.pop(oldest).drain()
            return True
        self._tell_of_bound(most, num_bytes)
        return False

    def note(self, key: InputKey, step: int) -> None:
        """Take note that training pass number `step` was given an input."""
        self.last = key
        self.seen[key.number] = step
        self.seen.move_to_end(key.number)
        while len(self.seen) > _MOST_SEEN:
            self.seen.popitem(last=False)

    def ask_refresh(self) -> None:
        """Have the rows of every input computed again before the next step on it."""
        for histories in self._kept.values():
            histories.is_refresh_asked = True

    def drop_rows(self) -> None:
        """Forget all rows, of weights that are no more; the next step on each input is exact."""
        self.saved.clear()
        for histories in self._kept.values():
            histories.drop()

    def tell_change(self, key: InputKey) -> None:
        """Say once that a step is exact because it is given something else than the last one."""
        names = [] if self.last is None else key.changed(self.last)
        self.num_changed += bool(names)
        if names:
            is_random = self.last is None or key.graph == self.last.graph
            self._fallbacks.tell(
                f"The pipelined module was given another {' and another '.join(names[:3])} than in "
                "the step before",
                origin="pipelined steps",
                to="an exact step for each new input. Rows of neighbours are read from earlier "
                "steps on the same input only; one that comes again is pipelined from its third "
                "step on",
                remedy=_RANDOM if is_random else _SAMPLED,
            )

    def tell_share(self, num_steps: int) -> None:
        """Say how many of the run's steps were exact because of their inputs, if any were."""
        if self.num_changed and not self._is_quiet:
            log.warning(
                "%d of %d training steps were exact, since their inputs were new.",
                self.num_changed,
                num_steps,
            )

    def _tell_of_bound(self, most: int, num_bytes: int) -> None:
        self._fallbacks.tell(
            f"Histories are kept for {most} inputs of {num_bytes >> 20} MiB a rank (at most "
            f"{_MOST_KEPT} inputs and {_MOST_BYTES >> 30} GiB)",
            origin="pipelined steps",
            to="exact steps on further inputs",
        )

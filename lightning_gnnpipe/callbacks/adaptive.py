"""Staleness that is controlled by what is measured: drift of the chunks, and the loss.

drift by chunk  ->  the worst chunks go first: all behind them read them fresh
drift, loss     ->  an exact epoch is next, within a budget
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_gnnpipe.callbacks.access import check_count, logged_value, pipe_strategy
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history import Staleness

_LEAST_DRIFT = 0.01  # what is less is no harm, and once training has settled it is rounding


@dataclass(frozen=True, slots=True)
class StalenessEvent:
    """Something that `AdaptiveStaleness` did.

    Attributes:
        epoch: The epoch that was made exact, or at whose end the chunks were chosen; from 0.
        action: "exact_epoch", or "leading_chunks" for a change of the chunks that go first.
        reason: Why, with figures.
        chunks: The chunks that go first from then on; empty for an exact epoch.
    """

    epoch: int
    action: Literal["exact_epoch", "leading_chunks"]
    reason: str
    chunks: tuple[int, ...] = ()


class AdaptiveStaleness(Callback):
    """Renews the worst chunks, or runs an exact epoch, when drift or loss ask for it.

    At the end of every n-th epoch the drift of each chunk is measured. Chunks that have drifted
    much farther than the others go first in the next epochs, until it is measured again: all behind
    them then read them fresh, which takes no time. They themselves read those behind them stale,
    and where gradients of fresh and stale rows count differently, as by default, the same ones
    count more as long as it lasts. At most a quarter of the chunks goes first.

    An exact epoch is next when the drift of all rows is above `max_drift`, or the loss has risen,
    or has not fallen for a while; a loss that does not fall asks for one only, until it has fallen
    again. A budget keeps a run that has settled from becoming exact. Epochs that are exact anyway,
    as by `StalenessWarmup`, are not counted.

    What it did is in `events`, is summed up when training ends, and is logged each epoch as
    `adaptive/exact_epochs` (those so far) and `adaptive/leading_chunks` (how many went first).

    `max_drift` is off by default, because what is much depends on the model: dropout counts as
    drift, and with a rate of 0.5 a relative drift of 1 is nothing but two masks. Look at
    `history/drift` of a run that went well before setting it. Comparing chunks needs no such
    number, as dropout is the same for all. `max_rise` has to be above the noise of the metric.

    Args:
        monitor: Name of a logged metric that should fall.
        every_n_epochs: Measure the last of every n epochs, at one more read of every history.
        lead_above: Chunks go first whose drift is above so many times the median of all chunks, and
            above 0.01.
        max_drift: Relative drift of all rows above which the next epoch is exact; None for none.
        max_rise: Rise of the metric above its best value, as a share of it, above which the next
            epoch is exact.
        patience: Epochs without a new best value after which the next one is exact.
        max_exact_frac: The most of all epochs so far that may have been made exact, from 0 to 1.

    Attributes:
        events: What was done, a list of `StalenessEvent`, in order; the same on every rank.
        num_exact_epochs: Epochs that were made exact.
        leading_chunks: The chunks that go first at present.

    Raises:
        ConfigError: If an argument cannot be right; in training, if the metric is not logged.

    Example:
        >>> from lightning_gnnpipe import AdaptiveStaleness
        >>> callback = AdaptiveStaleness(monitor="train_loss", patience=10)
    """

    def __init__(
        self,
        *,
        monitor: str = "train_loss",
        every_n_epochs: int = 5,
        lead_above: float = 1.5,
        max_drift: float | None = None,
        max_rise: float = 0.5,
        patience: int = 10,
        max_exact_frac: float = 0.1,
    ) -> None:
        super().__init__()
        check_count("every_n_epochs", every_n_epochs, 1)
        check_count("patience", patience, 1)
        _check_range("lead_above", lead_above, 1, math.inf)
        _check_range("max_drift", 0 if max_drift is None else max_drift, 0, math.inf)
        _check_range("max_rise", max_rise, 0, math.inf)
        _check_range("max_exact_frac", max_exact_frac, 0, 1)
        self.monitor, self.every_n_epochs, self.patience = monitor, every_n_epochs, patience
        self.lead_above, self.max_drift, self.max_rise = lead_above, max_drift, max_rise
        self.max_exact_frac = max_exact_frac
        self.events: list[StalenessEvent] = []
        self.num_exact_epochs = 0
        self.leading_chunks: tuple[int, ...] = ()
        self._num_chunks = 0  # of the plan in which they are numbered
        self._best = math.inf
        self._num_stalled = 0
        self._has_answered = False  # whether the stall has had its exact epoch
        self._reason = ""  # why the next epoch is to be exact, if it is
        self._has_trained = False  # whether a step of the epoch has run
        self._is_recording = self._is_exact = False  # switches that are on because of us

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pipe_strategy(self, trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        expected = pipe_strategy(self, trainer).engine.options.chunks.expected
        if self._num_chunks != expected:  # resumed with chunks that are numbered otherwise
            self.leading_chunks = ()
        self._has_trained = self._is_recording = self._is_exact = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Flip the switches, after all callbacks that do so when an epoch starts."""
        controls = pipe_strategy(self, trainer).controls
        controls.leading_chunks, self._has_trained = self.leading_chunks, True
        if self._is_due(trainer) and not controls.records_staleness:
            controls.records_staleness = self._is_recording = True
        if self._reason and not controls.is_exact:
            controls.is_exact = self._is_exact = True
            self.num_exact_epochs += 1
            event = StalenessEvent(trainer.current_epoch, "exact_epoch", self._reason)
            self.events.append(event)
        self._reason = ""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._has_trained:  # resumed at the end of an epoch: there is nothing to look at
            return
        self._switch_off(trainer)
        values = {
            "adaptive/exact_epochs": float(self.num_exact_epochs),
            "adaptive/leading_chunks": float(len(self.leading_chunks)),
        }
        reasons = self._watch_drift(trainer) if self._is_due(trainer) else []
        reasons += self._watch_loss(logged_value(self, trainer, self.monitor))
        pl_module.log_dict(values, batch_size=1)
        num_epochs = trainer.current_epoch + 2  # with the next
        if reasons and self.num_exact_epochs + 1 <= self.max_exact_frac * num_epochs:
            self._reason = "; ".join(reasons)
            self._has_answered |= self._num_stalled >= self.patience

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        exact = [event for event in self.events if event.action == "exact_epoch"]
        num_changes = len(self.events) - len(exact)
        last = f" (the last, {exact[-1].epoch}: {exact[-1].reason})" if exact else ""
        rank_zero_info(
            f"AdaptiveStaleness: made {len(exact)} of {trainer.current_epoch} epochs exact{last}; "
            f"changed the leading chunks {num_changes} times, now {list(self.leading_chunks)}."
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "events": [asdict(event) for event in self.events],
            "num_exact_epochs": self.num_exact_epochs,
            "leading_chunks": self.leading_chunks,
            "num_chunks": self._num_chunks,
            "best": self._best,
            "num_stalled": self._num_stalled,
            "has_answered": self._has_answered,
            "reason": self._reason,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.events = [StalenessEvent(**event) for event in state_dict["events"]]
        self.num_exact_epochs = state_dict["num_exact_epochs"]
        self.leading_chunks = tuple(state_dict["leading_chunks"])
        self._num_chunks = state_dict["num_chunks"]
        self._best, self._num_stalled = state_dict["best"], state_dict["num_stalled"]
        self._has_answered, self._reason = state_dict["has_answered"], state_dict["reason"]

    def _is_due(self, trainer: pl.Trainer) -> bool:
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _switch_off(self, trainer: pl.Trainer) -> None:
        """Switch off, after an epoch, what we have switched on and nothing else."""
        controls = pipe_strategy(self, trainer).controls
        controls.records_staleness &= not self._is_recording
        controls.is_exact &= not self._is_exact
        self._has_trained = self._is_recording = self._is_exact = False

    def _watch_drift(self, trainer: pl.Trainer) -> list[str]:
        """Choose the chunks that go first; return why the next epoch is to be exact, if it is."""
        total = Staleness()
        for one in pipe_strategy(self, trainer).collect_staleness().values():
            total.add(one)
        if total.drift_of_chunk:  # an exact epoch has none
            self._choose_leading(trainer.current_epoch, total.drift_of_chunk)
        if self.max_drift is None or total.drift <= self.max_drift:
            return []
        return [f"drift {total.drift:.4g} is above {self.max_drift:g}"]

    def _choose_leading(self, epoch: int, drift: Mapping[int, float]) -> None:
        usual = median(drift.values())
        bound = max(self.lead_above * usual, _LEAST_DRIFT)
        leading = worst_chunks(drift, bound)
        if leading != self.leading_chunks:
            figures = ", ".join(f"{chunk}: {drift[chunk]:.4g}" for chunk in leading) or "none"
            reason = f"drift above {bound:.4g}, with a median of {usual:.4g}: {figures}"
            self.events.append(StalenessEvent(epoch, "leading_chunks", reason, leading))
        self.leading_chunks, self._num_chunks = leading, len(drift)

    def _watch_loss(self, value: float) -> list[str]:
        """Return why the next epoch is to be exact, if it is."""
        name, best = self.monitor, self._best
        if value < best:
            self._best, self._num_stalled, self._has_answered = value, 0, False
            return []
        self._num_stalled += 1
        reasons = []
        if value > best + self.max_rise * abs(best):
            share = f"more than {self.max_rise:.0%}"
            reasons.append(f"{name} {value:.4g} is {share} above its best, {best:.4g}")
        if self._num_stalled >= self.patience and not self._has_answered:
            reasons.append(f"{name} has not been below {best:.4g} for {self._num_stalled} epochs")
        return reasons


def worst_chunks(drift: Mapping[int, float], bound: float) -> tuple[int, ...]:
    """Return the chunks whose drift is above `bound`, worst first, at most a quarter of all."""
    above = [chunk for chunk in drift if drift[chunk] > bound]
    return tuple(sorted(above, key=lambda chunk: (-drift[chunk], chunk))[: len(drift) // 4])


def _check_range(name: str, value: float, least: float, most: float) -> None:
    """Refuse a number that is out of its range."""
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return
    bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    raise ConfigError(
        explain(
            expected=f"'{name}' to be a number {bounds}",
            found=repr(value),
            remedy="Leave it at its default, for instance.",
        )
    )

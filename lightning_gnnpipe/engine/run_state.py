"""Where a run stood when it stopped: what a checkpoint says of it beside weights and histories.

It is small, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lightning_gnnpipe.errors import CheckpointError, explain

_VERSION = 16


@dataclass(frozen=True, slots=True)
class InputState:
    """The histories of one input, but for their rows; see `Histories`."""

    number: int
    filled: tuple[Hashable, ...]
    last_step: int
    owes_renewal: bool
    is_refresh_asked: bool


@dataclass(frozen=True, slots=True)
class RunState:
    """A run between two steps, but for weights and histories.

    Attributes:
        seed: Of chunk orders, dropout and partition.
        num_training_passes: Training passes made.
        num_inferences: Passes without gradients made.
        stage_layers: Layers of each stage.
        num_shards: Shards of the graph.
        inputs: Those with histories.
        seen: The last inputs, by number, each with the training pass in which it came last.
        losses: The last ones; see `LossGuard`.
        steps_since_jump: Steps since one of them jumped.
        was_exact: Whether the last step was exact.
        stale_norms: Norms whose running statistics pipelined steps have updated; see
            `RunningStatistics`.
        num_random_inputs: Inputs that were new because of random numbers.
        version: Of this format.
    """

    seed: int
    num_training_passes: int
    num_inferences: int
    stage_layers: tuple[int, ...]
    num_shards: int
    inputs: tuple[InputState, ...]
    seen: tuple[tuple[int, int], ...]
    losses: tuple[float, ...]
    steps_since_jump: int
    was_exact: bool
    stale_norms: tuple[str, ...]
    num_random_inputs: int
    version: int = _VERSION

    @property
    def num_ranks(self) -> int:
        """Ranks of the run, each with histories of its own."""
        return len(self.stage_layers) * self.num_shards

    def as_dict(self) -> dict[str, Any]:
        """Return the state in plain types, for a checkpoint."""
        return asdict(self)

    def without_histories(self) -> RunState:
        """Return the state where none are kept."""
        return replace(self, inputs=(), seen=())

    @staticmethod
    def of(saved: Mapping[str, Any]) -> RunState:
        """Return the state that `as_dict` has made.

        Raises:
            CheckpointError: If it was made by a version with another format.
        """
        names = {field.name for field in fields(RunState)}
        if saved.get("version") != _VERSION or not names <= saved.keys():
            raise CheckpointError(
                explain(
                    expected=f"the state of a pipeline in format {_VERSION}",
                    found=f"format {saved.get('version')}",
                    remedy="Load the checkpoint with the version of lightning_gnnpipe that wrote "
                    "it, or delete its key 'gnnpipe': the weights are stock Lightning's.",
                )
            )
        inputs = tuple(InputState(**one) for one in saved["inputs"])
        return RunState(**{name: saved[name] for name in names} | {"inputs": inputs})


RankHistories = Mapping[int, Sequence[Mapping[str, Any]]]
"""What one rank keeps of each input's histories, by number: see `save_rank`."""


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run to go on with: its state, and the histories of each of its ranks."""

    state: RunState
    stages: tuple[RankHistories, ...]

    def histories(self) -> dict[int, SavedHistories]:
        """Return the histories of all ranks, by the number of their input."""
        if not self.stages:
            return {}
        return {
            one.number: SavedHistories(
                one, [part for rank in self.stages for part in rank.get(one.number, ())]
            )
            for one in self.state.inputs
        }


@dataclass(frozen=True, slots=True)
class SavedHistories:
    """The histories of one input: their state, and what each rank of the run had of them."""

    state: InputState
    parts: Sequence[Mapping[str, Any]]

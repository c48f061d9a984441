"""The state of a run in checkpoints: counts, seeds and histories.

`save_rank` returns the histories of one rank's layers, and their row order. A run with another
number of stages or chunks picks the rows that its layers need.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gnnpipe.engine.known_graphs import Histories
from lightning_gnnpipe.errors import CheckpointError, Fallbacks
from lightning_gnnpipe.passing import CallKey
from lightning_gnnpipe.staleness import name_method

_VERSION = 20


@dataclass(frozen=True, slots=True)
class InputState:
    """State of one input's histories without the rows; see `Histories`."""

    number: int
    filled: tuple[Hashable, ...]
    last_step: int
    is_renewed: bool
    is_refresh_due: bool


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run between two steps, without weights and rows.

    `inputs`: the least recently used first. For the norm and random fields see
    `RunningStatistics` and `InputIdentity`, for `chosen_chunks` `RunOptions`.
    """

    seed: int
    num_training_passes: int
    stage_layers: tuple[int, ...]
    num_shards: int
    inputs: tuple[InputState, ...]
    stale_norms: tuple[str, ...]
    num_random_inputs: int
    chosen_chunks: int | None
    version: int = _VERSION

    @property
    def num_ranks(self) -> int:
        """Number of ranks that save histories."""
        return len(self.stage_layers) * self.num_shards

    def without_histories(self) -> RunState:
        return replace(self, inputs=())

    @staticmethod
    def of(saved: Mapping[str, Any]) -> RunState:
        """Return the state from `asdict`; raise CheckpointError if its format differs."""
        names = {field.name for field in fields(RunState)}
        if saved.get("version") != _VERSION or not names <= saved.keys():
            raise CheckpointError(
                expected=f"the state of a pipeline in format {_VERSION}",
                found=f"format {saved.get('version')}",
                remedy="Load the checkpoint with the version of lightning_gnnpipe that wrote "
                "it, or delete its key 'gnnpipe': the weights are stock Lightning's.",
            )
        inputs = tuple(InputState(**one) for one in saved["inputs"])
        return RunState(**{name: saved[name] for name in names} | {"inputs": inputs})


RankHistories = Mapping[int, Sequence[Mapping[str, Any]]]
"""What one rank keeps of each input's histories, by number: see `save_rank`."""


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run to resume: its state, and the histories of each of its ranks."""

    state: RunState
    stages: tuple[RankHistories, ...]

    @property
    def lack(self) -> str:
        """Why an input has no histories here, and what to do for a run that has some."""
        if not self.state.inputs:
            return (
                "it was saved after fit, after an error, or by a run in one chunk. Let a "
                "ModelCheckpoint save it, which does so while fit runs."
            )
        if not self.stages:
            return (
                "they are not beside it. Copy the folder .gnnpipe with the checkpoint, to all "
                "hosts; remote storage does not keep it."
            )
        return (
            "those that it has are of another graph, other arguments or layers. Go on with what "
            "the saved run had."
        )

    def histories(self) -> dict[int, SavedHistories]:
        """Return the histories of all ranks by input number."""
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
    """Saved histories of one input: their state, and the part of each rank."""

    state: InputState
    parts: Sequence[Mapping[str, Any]]

    def noting(self, **facts: Any) -> SavedHistories:
        """Return them with other facts in their state."""
        return replace(self, state=replace(self.state, **facts))


log = logging.getLogger(__name__)


def save_rank(own: Histories) -> dict[str, Any]:
    """Return the histories of this rank's layers in plain types; copies nothing."""
    store, graph = own.store, own.graph
    num_nodes = graph.plan.num_nodes
    histories = []
    for key in store:
        saved = store.save(key)
        for name in ("rows", "kept"):
            if saved[name] is not None:  # owners save the ghosts
                saved[name] = saved[name][:num_nodes]
        histories.append({"key": _plain(key), **saved})
    dtypes = own.writing.dtypes
    moments = [
        {"key": _plain(key), **one.save(), "dtype": dtypes.get(key)}
        for key, one in store.moments.calls.items()
    ]
    return {
        "perm": graph.plan.perm,
        "ends": [chunk.end for chunk in graph.plan.chunks],
        "histories": histories,
        "moments": moments,
        "method": name_method(store.options.method),
    }


def take_histories(saved: SavedHistories, own: Histories, segments: Collection[int]) -> None:
    """Load the saved histories of `segments` into `own`."""
    load_ranks(own, saved.parts, segments)
    state = saved.state
    own.last_step = state.last_step
    own.filled.update(state.filled)
    own.is_renewed, own.is_refresh_due = state.is_renewed, state.is_refresh_due


def warn_of_mismatch(taken: SavedHistories | None, own: Histories, lack: str) -> None:
    """Warn if a resumed run starts exactly, by `lack`, or took rows of a different `staleness`."""
    now = name_method(own.store.options.method)
    if taken is not None and taken.parts[0]["method"] != now:
        log.warning(
            "The checkpoint was saved with staleness='%s', and this run has '%s': the method "
            "changes in the middle of training.",
            taken.parts[0]["method"],
            now,
        )
    elif taken is None and own.graph.plan.num_chunks > 1:
        Fallbacks(log).tell(
            "The first step runs exactly, since the checkpoint has no histories of this input: %s",
            lack,
        )


def load_ranks(
    own: Histories, ranks: Sequence[Mapping[str, Any]], segments: Collection[int]
) -> None:
    """Load the saved histories of `segments` in this run's row order."""
    graph, store = own.graph, own.store
    perm = graph.plan.perm.cpu()
    device = graph.plan.perm.device
    ends = [chunk.end for chunk in graph.plan.chunks]
    is_own = [saved["ends"] == ends and torch.equal(saved["perm"], perm) for saved in ranks]
    found: dict[CallKey, list[tuple[Tensor, Mapping[str, Any]]]] = {}
    for rank in ranks:
        for one in rank["histories"]:
            key = CallKey(*one["key"])
            if key.segment in segments:
                found.setdefault(key, []).append((rank["perm"], one))
        for one in rank["moments"]:
            key = CallKey(*one["key"])
            if key.segment in segments:
                has_means = any(is_own) and one["means"] is not None  # they cover all shards
                means = one["means"].to(device) if has_means else None
                if one["dtype"] is not None:
                    own.writing.dtypes[key] = one["dtype"]
                store.moments.load(key, means, one["total"].to(device), one["center"].to(device))
    row_nodes = graph.plan.row_nodes.cpu()
    of_rows = store.options.device or device  # a GPU may not have room for rows of the host
    for key, parts in found.items():
        nodes = torch.cat([nodes for nodes, _ in parts])
        places = _places(nodes, row_nodes)
        rows, kept = (
            _moved([one[name] for _, one in parts], places, of_rows) for name in ("rows", "kept")
        )
        assert rows is not None
        step, kept_step = (min(one[n] for _, one in parts) for n in ("step", "kept_step"))
        store.load(key, rows, kept, step, kept_step)


def _plain(key: Hashable) -> tuple[Any, ...]:
    assert isinstance(key, CallKey)
    return tuple(key)


def _places(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the position in `old` of each node of `new`; None if the orders are equal."""
    if torch.equal(old, new):
        return None
    position = torch.empty_like(old)
    position[old] = torch.arange(old.numel())
    return position[new]


def _moved(
    parts: Sequence[Tensor | None], places: Tensor | None, device: torch.device
) -> Tensor | None:
    kept = [part for part in parts if part is not None]
    if len(kept) < len(parts):
        return None
    rows = kept[0] if len(kept) == 1 else torch.cat(kept)
    return (rows if places is None else rows[places]).to(device)

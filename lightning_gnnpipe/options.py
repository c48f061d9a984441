"""Options of the strategy, checked at construction.

An option that has no effect beside the given ones, on any devices and any graph, is refused.
Options are not refused if they

- only have no effect on the present devices, so that a script runs on one device and on eight:
  `cut_codec`, `repeat_encoder` and `weights` with num_stages="auto", `start_method`, `timeout`,
  `cuda_graphs`, `plan_folder`;
- have no effect with `num_chunks=1`, the exact baseline of scripts: one warning names them;
- ask for what happens anyway: `self_check=False`, `balance="uniform"`, and the callback
   `StalenessWarmup` if every step is exact.

An option with its default value counts as not given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor

from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.errors import ConfigError, advice_on
from lightning_gnnpipe.graph import StoredGraph, check_num_chunks
from lightning_gnnpipe.staleness import METHODS, HistoryOptions, StalenessMethod
from lightning_gnnpipe.types import (
    CHUNKS_PER_STAGE,
    Balance,
    CodecOption,
    DtypeName,
    Partition,
    PartitionMethod,
    RepeatOption,
    StalenessName,
    StartMethod,
    Weights,
)

_CHOICES: dict[str, tuple[str, ...]] = {
    "partition": get_args(PartitionMethod),
    "balance": ("measured", "uniform"),
    "start_method": get_args(StartMethod),
    "staleness": get_args(StalenessName),
    "history_dtype": get_args(DtypeName),
    "weights": get_args(Weights),
}
_OTHER_VALUES: dict[str, Any] = {
    "partition": Tensor,
    "balance": (list, tuple),
    "history_dtype": (torch.dtype, type(None)),
}
_OF_CHUNKS = ("partition", "cuda_graphs", "exact_in_chunks", "table_folder")
_OF_ROWS = ("staleness", "history_dtype", "history_device")
# What `memory_gib` may set, by its price: seconds, rounding, seconds of exact passes.
SAVERS: dict[str, Any] = {
    "recompute": True,
    "history_dtype": "bfloat16",
    "exact_in_chunks": True,
}


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """See `GNNPipeStrategy`; raises ConfigError for values wrong on any graph and devices."""

    num_stages: int | Literal["auto"] = "auto"
    graph_parallel: int = 1
    data_parallel: int = 1
    num_chunks: int | Literal["auto"] = "auto"
    partition: Partition = "metis"
    plan_folder: str | Path | None = None
    staleness: StalenessName = "drift"
    pipelined_module: str | None = None
    balance: Balance = "measured"
    halo_codec: CodecOption = "fp32"
    cut_codec: CodecOption = "fp32"
    async_halo: bool = False
    repeat_encoder: RepeatOption = "auto"
    weights: Weights = "whole"
    recompute: bool = False
    history_dtype: torch.dtype | DtypeName | None = None
    history_device: torch.device | str | None = None
    table_folder: str | Path | None = None
    cuda_graphs: bool = False
    exact_in_chunks: bool = False
    memory_gib: float | None = None
    self_check: bool = True
    timeout: timedelta = timedelta(minutes=10)
    start_method: StartMethod = "popen"

    def __post_init__(self) -> None:
        self._check_counts()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            is_name = isinstance(value, str) or not isinstance(value, _OTHER_VALUES.get(name, ()))
            if is_name and value not in choices:
                near = get_close_matches(value, choices, 1) if isinstance(value, str) else []
                meant = f"Did you mean {near[0]!r}?" if near else "Choose one of them."
                remedy = advice_on(value) or meant
                _refuse(f"'{name}' to be one of {', '.join(choices)}", repr(value), remedy)
        get_codecs(self.halo_codec, "'halo_codec'")
        get_codecs(self.cut_codec, "'cut_codec'")
        if not isinstance(self.repeat_encoder, bool) and self.repeat_encoder != "auto":
            _refuse(
                "'repeat_encoder' to be True, False or 'auto'",
                repr(self.repeat_encoder),
                "'auto' repeats an encoder where this is cheap and saves traffic.",
            )
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0):
            _refuse(
                "'timeout' to be a positive datetime.timedelta",
                self.timeout,
                "Write timedelta(minutes=10), for instance.",
            )
        if self.memory_gib is not None and not 0 < self.memory_gib < float("inf"):
            _refuse("'memory_gib' to be positive", self.memory_gib, "Leave it out for no limit.")
        self._check_histories()
        self._check_effects()

    def _check_counts(self) -> None:
        for name, most in (("num_stages", "devices"), ("num_chunks", "nodes")):
            value = getattr(self, name)
            if value != "auto" and not _is_count(value):
                _refuse(
                    f"'{name}' to be between 1 and the number of {most}, or 'auto'",
                    repr(value),
                    f"Write a whole number, such as {name}=8, or leave it out.",
                )
        for name, remedy in (
            (
                "graph_parallel",
                "1 does not split the graph. To find the best number for N devices, run "
                "`gnnpipe plan --num_devices N`.",
            ),
            ("data_parallel", "1 trains a single pipeline."),
        ):
            if not _is_count(getattr(self, name)):
                _refuse(f"'{name}' to be at least 1", repr(getattr(self, name)), remedy)

    def _check_histories(self) -> None:
        dtype, device = self.history_dtype, self.history_device
        if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
            _refuse(
                "'history_dtype' to be a floating-point dtype",
                dtype,
                "Use torch.bfloat16, for instance.",
            )
        try:
            has_memory = device is None or torch.device(device).type != "meta"
        except (RuntimeError, TypeError):
            has_memory = False
        if not has_memory:
            _refuse(
                "'history_device' to be a device with memory", device, "Use 'cpu', for instance."
            )
        if self.table_folder is not None and device not in (None, "cpu", torch.device("cpu")):
            _refuse("'history_device' to be 'cpu' with 'table_folder'", device, "Leave it out.")
        for name in filter(self._is_given, ("history_device", "table_folder")):
            if self.graph_parallel != 1:
                _refuse(
                    f"'{name}' to be None with graph_parallel={self.graph_parallel}",
                    getattr(self, name),
                    "Leave it out, or use graph_parallel=1.",
                )

    def _check_effects(self) -> None:
        """Refuse options that have no effect beside the given ones."""
        if self.for_graphs and self.graph_parallel != 1:
            _refuse(
                f"'graph_parallel' to be 1 with {self.for_graphs}",
                self.graph_parallel,
                f"{self.for_graphs} is for batches of graphs, which are not split into shards. "
                "Use more stages or more replicas.",
            )
        if self.for_graphs:
            why = "in batches of graphs, no graph is cut into chunks and nothing is stale"
            use = f"leave out {self.for_graphs}"
            of_chunks = (*_OF_CHUNKS, *_OF_ROWS, "plan_folder", "memory_gib")
            self._refuse_given(of_chunks, self.for_graphs, why, use)
        if self.graph_parallel == 1:
            names, why = ("halo_codec", "async_halo"), "there is only one shard"
            self._refuse_given(names, "graph_parallel=1", why, "use graph_parallel=2 or more")
        if self.num_stages == 1:
            names, why = ("cut_codec", "repeat_encoder"), "there is only one stage"
            self._refuse_given(names, "num_stages=1", why, "use num_stages='auto'")
        if self.num_stages == 1 and self.exact_in_chunks:
            setting = "num_stages=1 and exact_in_chunks=True"
            why, use = "every step is exact, so nothing is stale", "leave out exact_in_chunks"
            self._refuse_given((*_OF_ROWS, "cuda_graphs"), setting, why, use)

        if self.graph_parallel > 1:
            setting = f"graph_parallel={self.graph_parallel}"
            if self.exact_in_chunks:
                _refuse(
                    f"'exact_in_chunks' to be left out with {setting}",
                    True,
                    "It needs the whole graph on each stage. Leave it out, or graph_parallel.",
                )
            why, use = "memory of shards is only planned, by `gnnpipe plan`", "use more stages"
            self._refuse_given(("memory_gib",), setting, why, use)
        uncaptured = ("recompute", "graph_parallel", "history_device", "table_folder")
        for name in filter(self._is_given, uncaptured):
            setting = f"{name}={getattr(self, name)!r}"
            why, use = f"chunks with {name} are not captured", f"leave out {name}"
            self._refuse_given(("cuda_graphs",), setting, why, use)

    def _refuse_given(self, names: tuple[str, ...], setting: str, why: str, use: str) -> None:
        for name in filter(self._is_given, names):
            _refuse(
                f"'{name}' to be left out with {setting}",
                repr(getattr(self, name)),
                f"It has no effect: {why}. Leave it out, or {use}.",
            )

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        if name == "partition" and isinstance(value, Tensor):
            return False  # checked against the number of chunks
        if name == "repeat_encoder":
            return value is True
        if name.endswith("codec") and not isinstance(value, str):
            return any(one != _DEFAULTS[name] for one in value)
        return bool(value != _DEFAULTS[name])

    def savings(self) -> Iterator[StrategyOptions]:
        """Yield these options, then with more and more of `SAVERS` that are not given."""
        free = [name for name in SAVERS if not self._is_given(name)]
        for number in range(2 ** len(free)):
            chosen = [name for place, name in enumerate(free) if number >> place & 1]
            try:
                yield replace(self, **{name: SAVERS[name] for name in chosen})
            except ConfigError:  # another option forbids it
                continue

    def saved_beside(self, given: StrategyOptions) -> dict[str, Any]:
        """Return what saves memory here and not in `given`."""
        ours = {name: getattr(self, name) for name in SAVERS}
        return {name: one for name, one in ours.items() if one != getattr(given, name)}

    @property
    def saves_memory(self) -> bool:
        """Whether memory that chunks have freed goes back to the system."""
        return self.exact_in_chunks or self.table_folder is not None

    @property
    def of_chunks(self) -> list[str]:
        """Names of given options that only act on a graph in several chunks."""
        return list(filter(self._is_given, (*_OF_CHUNKS, *_OF_ROWS, "memory_gib")))

    @property
    def idle_in_one_chunk(self) -> list[str]:
        """Names of given options without effect, if there is one chunk."""
        if self.num_chunks != 1:
            return []
        has_rows = self.async_halo or (self.recompute and self.graph_parallel > 1)
        idle = (*_OF_CHUNKS, *(() if has_rows else _OF_ROWS))
        return [one for one in self.of_chunks if one in idle]

    @property
    def for_graphs(self) -> str:
        """The option that requires batches of graphs; "" if there is none."""
        return f"data_parallel={self.data_parallel}" if self.data_parallel > 1 else ""

    @property
    def method(self) -> StalenessMethod:
        """How stale embeddings and gradients between chunks are handled."""
        return METHODS[self.staleness]

    @property
    def histories(self) -> HistoryOptions:
        """How histories are kept."""
        folder = None if self.table_folder is None else Path(self.table_folder)
        given_device = self.history_device or (None if folder is None else "cpu")
        device = None if given_device is None else torch.device(given_device)
        given = self.history_dtype
        dtype = getattr(torch, given) if isinstance(given, str) else given
        return HistoryOptions(self.method, dtype, device, folder)

    def resolve_layout(self, world_size: int) -> tuple[int, int]:
        """Return stages and shards of a replica, S and G; raise ConfigError if they do not fit."""
        replicas, shards = self.data_parallel, self.graph_parallel
        left = world_size
        for name, number in (("data_parallel", replicas), ("graph_parallel", shards)):
            if left % number:
                _refuse(
                    f"'{name}' to divide the number of processes, {left}",
                    number,
                    f"Use Trainer(devices={number}) for one stage, or a multiple for more.",
                )
            left //= number
        if self.num_stages not in ("auto", left):
            _refuse(
                f"'num_stages' to be {left} for {world_size} processes with "
                f"graph_parallel={shards} and data_parallel={replicas}",
                self.num_stages,
                f"Use Trainer(devices={self.num_stages * shards * replicas}), or "
                "num_stages='auto'.",
            )
        return left, shards

    @property
    def has_free_chunks(self) -> bool:
        """Whether neither num_chunks nor a partition says how many chunks a graph has."""
        return self.num_chunks == "auto" and isinstance(self.partition, str)

    def with_chunks_of(self, stored: StoredGraph) -> StrategyOptions:
        """Return the options for a graph from a folder: its chunks, unless some are named."""
        is_free = isinstance(self.partition, str) and self.partition == "metis"
        return replace(self, partition=stored.parts) if is_free and self.num_chunks != 1 else self

    def expect_num_chunks(self, num_stages: int) -> int:
        """Return K as far as it is known before the graph."""
        if isinstance(self.partition, Tensor):
            return int(self.partition.max()) + 1 if self.partition.numel() else 1
        return CHUNKS_PER_STAGE * num_stages if self.num_chunks == "auto" else self.num_chunks

    def count_chunks(self, num_stages: int, num_nodes: int) -> int:
        """Return K for a graph; raise ConfigError if it is out of range or not the partition's."""
        expected = self.expect_num_chunks(num_stages)
        if self.num_chunks == "auto":
            return expected if isinstance(self.partition, Tensor) else min(expected, num_nodes)
        check_num_chunks(self.num_chunks, num_nodes)
        if expected != self.num_chunks:
            _refuse(
                f"'partition' to have {self.num_chunks} chunks, like 'num_chunks'",
                expected,
                "Leave num_chunks at 'auto' when you give a partition, or a folder in chunks.",
            )
        return expected


_DEFAULTS = {one.name: one.default for one in fields(StrategyOptions)}


@dataclass(slots=True)
class RunOptions:
    """The options in one run.

    Attributes:
        given: The strategy's, with those chosen to fit into `memory_gib`.
        num_stages: Stages, S.
        seed: Of the order of chunks, and random numbers in layers; equal on all ranks.
        is_fitting: Whether the run trains.
        chosen: Chunks of a graph with num_chunks="auto", once chosen by measured costs or a folder,
            by this run or the one it resumes.
        stored: The present graph, if it is from a folder.
        memory: What is said of the memory of a process.
        cut: The strategy's options, with the chunks of that folder where they are taken.
        trains_exactly: All training steps on a graph are exact: `exact_in_chunks` on one stage.
    """

    given: StrategyOptions
    num_stages: int
    seed: int = 0
    is_fitting: bool = True
    chosen: int | None = None
    stored: StoredGraph | None = None
    memory: str = ""
    cut: StrategyOptions = field(init=False)
    trains_exactly: bool = field(init=False)

    def __post_init__(self) -> None:
        self.open(self.stored)

    def open(self, stored: StoredGraph | None) -> None:
        """Begin a step on a graph from a folder, or on another one."""
        self.stored, self.cut = stored, self.given
        self.trains_exactly = self.given.exact_in_chunks and self.num_stages == 1
        if stored is not None and self.graph_chunks > 1:
            self.cut = self.given.with_chunks_of(stored)
            if self.given.has_free_chunks and self.chosen is None:
                self.chosen = stored.plan.num_chunks

    @property
    def num_chunks(self) -> int:
        """K as far as it is known before the graph."""
        given = self.cut.expect_num_chunks(self.num_stages)
        return self.chosen if self.chosen is not None and self.cut.has_free_chunks else given

    @property
    def graph_chunks(self) -> int:
        """K of a large graph; 1 on one stage, unless options ask for chunks."""
        given = self.given
        need = [one for one in given.of_chunks if one != "cuda_graphs"]
        is_asked = not given.has_free_chunks or bool(need)
        is_whole = self.num_stages == 1 and not is_asked and self.chosen is None
        return 1 if is_whole else self.num_chunks

    @property
    def most_parts(self) -> int:
        """The most micro-batches of a batch; 1 on one stage, unless `num_chunks` says more."""
        is_whole = self.num_stages == 1 and self.given.num_chunks == "auto"
        return 1 if is_whole else self.num_chunks

    def measures(self, num_layers: int) -> bool:
        """Whether layers are measured, to balance stages or to fit into `memory_gib`."""
        is_balanced = self.given.balance == "measured" and 1 < self.num_stages < num_layers
        return is_balanced or self.given.memory_gib is not None

    def measures_chunks(self, num_layers: int) -> bool:
        """Whether measured costs choose K of a graph.

        Not in deterministic runs, since costs vary; nor with `recompute`, which saves memory that
        few chunks would use, unless `memory_gib` says how much there is.
        """
        is_saving = self.given.recompute and self.given.memory_gib is None
        is_free = self.cut.has_free_chunks and self.chosen is None and not is_saving
        is_fixed = torch.are_deterministic_algorithms_enabled()
        return is_free and not is_fixed and self.measures(num_layers)

    def fits(self, num_nodes: int) -> bool:
        """Whether a graph has as many nodes as the partition, and no fewer than chunks."""
        partition, num_chunks = self.cut.partition, self.cut.num_chunks
        if isinstance(partition, Tensor) and partition.numel() != num_nodes:
            return False
        return num_chunks == "auto" or num_chunks <= num_nodes

    def count_chunks(self, num_nodes: int) -> int:
        """Return K for a graph; raise ConfigError if it is out of range or not the partition's."""
        if self.cut.has_free_chunks:
            return min(self.graph_chunks, num_nodes)
        return self.cut.count_chunks(self.num_stages, num_nodes)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _refuse(expected: str, found: Any, remedy: str) -> NoReturn:
    raise ConfigError(expected=expected, found=str(found), remedy=remedy)

"""Options of the strategy, checked at construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_gnnpipe.codecs import MessageOptions
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.idle_options import check_idle, for_graphs, idle_in_one_chunk
from lightning_gnnpipe.removed import advice_on
from lightning_gnnpipe.staleness import METHODS, HistoryOptions, StalenessMethod
from lightning_gnnpipe.steps import ChunkOptions, EngineOptions
from lightning_gnnpipe.types import (
    CHUNKS_PER_STAGE,
    ChangingInputs,
    CodecOption,
    CrossChunkEdges,
    DtypeName,
    OrderName,
    Partition,
    PartitionMethod,
    RepeatOption,
    ScheduleName,
    StalenessName,
    StartMethod,
)

BalanceOption = Literal["measured", "uniform"] | Sequence[int]


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """See `GNNPipeStrategy` for the meaning of each option.

    Raises:
        ConfigError: If an option is wrong on any graph and any devices.
    """

    num_stages: int | Literal["auto"]
    num_chunks: int | Literal["auto"]
    partition: Partition
    chunk_order: OrderName
    staleness: StalenessName
    pipelined_module: str | None
    balance: BalanceOption
    recompute: bool
    history_dtype: torch.dtype | DtypeName | None
    history_device: torch.device | str | None
    self_check: bool
    timeout: timedelta
    start_method: StartMethod
    save_distributed_checkpoint: bool = False
    graph_parallel: int = 1
    data_parallel: int = 1
    halo_codec: CodecOption = "fp32"
    cut_codec: CodecOption = "fp32"
    async_halo: bool = False
    repeat_encoder: RepeatOption = "auto"
    cross_chunk_edges: CrossChunkEdges = "keep"
    schedule: ScheduleName = "fill_drain"
    num_virtual: int = 2
    guard: bool = True
    changing_inputs: ChangingInputs = "exact"

    def __post_init__(self) -> None:
        _check_count("num_stages", self.num_stages, "the number of devices")
        _check_count("num_chunks", self.num_chunks, "the number of nodes")
        if not is_count(self.graph_parallel):
            _refuse(
                "'graph_parallel' to be at least 1",
                repr(self.graph_parallel),
                "1 leaves the graph in one piece on each stage. For what is best on N devices run "
                "`gnnpipe plan --num_devices N`, and write the number that it prints.",
            )
        if not isinstance(self.partition, Tensor):
            _check_choice("partition", self.partition, get_args(PartitionMethod))
        if isinstance(self.balance, str):
            _check_choice("balance", self.balance, ("measured", "uniform"))
        _check_choice("cross_chunk_edges", self.cross_chunk_edges, get_args(CrossChunkEdges))
        _check_choice("changing_inputs", self.changing_inputs, get_args(ChangingInputs))
        _check_choice("start_method", self.start_method, get_args(StartMethod))
        _check_choice("chunk_order", self.chunk_order, get_args(OrderName))
        _check_choice("staleness", self.staleness, tuple(METHODS))
        if isinstance(self.history_dtype, str):
            _check_choice("history_dtype", self.history_dtype, get_args(DtypeName))
        elif self.history_dtype is not None and not self.history_dtype.is_floating_point:
            _refuse(
                "'history_dtype' to be a floating-point dtype",
                self.history_dtype,
                "Use torch.bfloat16, for instance.",
            )
        _check_device(self.history_device)
        if self.history_device is not None and self.graph_parallel != 1:
            _refuse(
                "'history_device' to be None where the graph is split over shards",
                self.history_device,
                "Leave it out, or use graph_parallel=1.",
            )
        self.messages.check()
        _check_choice("schedule", self.schedule, get_args(ScheduleName))
        check_axes(self.data_parallel, self.graph_parallel, self.schedule, self.num_virtual)
        if not isinstance(self.repeat_encoder, bool) and self.repeat_encoder != "auto":
            _refuse(
                "'repeat_encoder' to be True, False or 'auto'",
                repr(self.repeat_encoder),
                "'auto' repeats what is cheap and spares bytes.",
            )
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0):
            _refuse(
                "'timeout' to be a positive datetime.timedelta",
                self.timeout,
                "Write timedelta(minutes=10), for instance.",
            )
        check_idle(self)

    def for_engine(self, seed: int, world_size: int, *, is_fitting: bool) -> EngineOptions:
        """Return the engine's options for a run on `world_size` processes."""
        num_stages, _ = self.resolve_layout(world_size)
        auto_chunks = CHUNKS_PER_STAGE * num_stages
        balance = self.balance
        if balance == "measured" and not is_fitting:
            balance = "uniform"  # stages run one after the other in exact passes
        return EngineOptions(
            ChunkOptions(
                self.num_chunks, self.partition, seed, auto_chunks, self.cross_chunk_edges
            ),
            self.histories,
            self.chunk_order,
            balance,
            seed,
            is_fitting,
            self.self_check,
            self.messages,
            self.repeat_encoder,
            self.schedule,
            self.num_virtual if self.schedule == "interleaved" else 1,
            guards_loss=self.guard,
            allows_changes=self.changing_inputs == "allow",
        )

    @property
    def idle_in_one_chunk(self) -> list[str]:
        """Names of given options without effect, if there is one chunk."""
        return idle_in_one_chunk(self)

    @property
    def for_graphs(self) -> str:
        """The option that requires batches of graphs; "" if there is none."""
        return for_graphs(self)

    @property
    def messages(self) -> MessageOptions:
        """How ranks send rows to each other."""
        return MessageOptions(self.halo_codec, self.cut_codec, self.async_halo)

    @property
    def method(self) -> StalenessMethod:
        """How stale rows and gradients between chunks are handled."""
        return METHODS[self.staleness]

    @property
    def histories(self) -> HistoryOptions:
        """How histories are kept."""
        device = None if self.history_device is None else torch.device(self.history_device)
        dtype = self.history_dtype
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        return HistoryOptions(self.method, self.recompute, dtype, device)

    def resolve_layout(self, world_size: int) -> tuple[int, int]:
        """Return the numbers of stages and shards of a replica, S and G.

        Raises:
            ConfigError: If the options do not fit the number of processes.
        """
        replicas, shards, stages = self.data_parallel, self.graph_parallel, self.num_stages
        world_size = self._replica_size(world_size)
        if world_size % shards:
            _refuse(
                f"'graph_parallel' to divide the number of processes, {world_size}",
                shards,
                f"Use Trainer(devices={shards}) for one stage, or a multiple of it for more.",
            )
        if stages not in ("auto", world_size // shards):
            _refuse(
                f"'num_stages' to be {world_size // shards}: the number of processes, "
                f"{world_size * replicas}"
                f"{f', over graph_parallel={shards}' if shards > 1 else ''}"
                f"{f', over data_parallel={replicas}' if replicas > 1 else ''}",
                stages,
                f"Use Trainer(devices={stages * shards * replicas}), or num_stages='auto'.",
            )
        return world_size // shards, shards

    def _replica_size(self, world_size: int) -> int:
        """Return the number of processes of a replica."""
        if world_size % self.data_parallel:
            _refuse(
                f"'data_parallel' to divide the number of processes, {world_size}",
                self.data_parallel,
                f"Use Trainer(devices={self.data_parallel}) for one stage, or a multiple of it for "
                "more.",
            )
        return world_size // self.data_parallel

    def expect_num_chunks(self, num_stages: int) -> int:
        """Return K as far as it is known before the graph."""
        auto_chunks = CHUNKS_PER_STAGE * num_stages
        return ChunkOptions(self.num_chunks, self.partition, 0, auto_chunks).expected


def _check_count(name: str, value: object, limit: str) -> None:
    if value != "auto" and not is_count(value):
        _refuse(
            f"'{name}' to be between 1 and {limit}, or 'auto'",
            value,
            f"Leave it at '{name}=\"auto\"'.",
        )


def _check_device(device: torch.device | str | None) -> None:
    try:
        is_storage = device is None or torch.device(device).type != "meta"
    except (RuntimeError, TypeError):
        is_storage = False
    if not is_storage:
        _refuse("'history_device' to be a device with memory", device, "Use 'cpu', for instance.")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        remedy = advice_on(value) or "Choose one of them."
        _refuse(f"'{name}' to be one of {', '.join(choices)}", repr(value), remedy)


def _refuse(expected: str, found: Any, remedy: str) -> None:
    raise ConfigError(explain(expected=expected, found=str(found), remedy=remedy))


def check_axes(
    data_parallel: object, graph_parallel: object, schedule: ScheduleName, num_virtual: object
) -> None:
    """Raise ConfigError if these options are wrong on any graph and any devices."""
    if not is_count(data_parallel):
        found, remedy = data_parallel, "1 gives all processes the same batches."
        _refuse("'data_parallel' to be at least 1", found, remedy)
    if data_parallel != 1 and graph_parallel != 1:
        _refuse(
            "'graph_parallel' to be 1 with data_parallel, which is for batches of graphs",
            graph_parallel,
            "Graphs of a batch are not split: use more stages, or more replicas.",
        )
    if not is_count(num_virtual):
        _refuse("'num_virtual' to be at least 1", num_virtual, "Leave it at 2.")
    if schedule != "fill_drain" and graph_parallel != 1:
        _refuse(
            f"'graph_parallel' to be 1 where schedule={schedule!r}",
            graph_parallel,
            "Only batches of graphs can go back early, and they have no shards.",
        )


def is_count(value: object) -> bool:
    """Whether `value` is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

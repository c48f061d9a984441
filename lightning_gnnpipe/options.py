"""The options of the strategy, checked as soon as they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_gnnpipe.comm import MessageOptions
from lightning_gnnpipe.engine import ChunkOptions, EngineOptions
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.history import HistoryOptions
from lightning_gnnpipe.types import (
    CHUNKS_PER_STAGE,
    CodecName,
    DtypeName,
    Partition,
    PartitionMethod,
    StartMethod,
)

BalanceOption = Literal["measured", "uniform"] | Sequence[int]


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """See `GNNPipeStrategy` for what each option means.

    Raises:
        ConfigError: If an option cannot be right, whatever the graph and the devices are.
    """

    num_stages: int | Literal["auto"]
    num_chunks: int | Literal["auto"]
    partition: Partition
    shuffle_chunks: bool
    cross_chunk_grad_scale: float
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
    halo_codec: CodecName = "fp32"
    cut_codec: CodecName = "fp32"
    async_halo: bool = False
    halo_momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_count("num_stages", self.num_stages, "the number of devices")
        _check_count("num_chunks", self.num_chunks, "the number of nodes")
        is_count = isinstance(self.graph_parallel, int) and self.graph_parallel >= 1
        if not is_count or isinstance(self.graph_parallel, bool):
            _refuse(
                "'graph_parallel' to be at least 1",
                self.graph_parallel,
                "1 leaves the graph in one piece on each stage.",
            )
        if not isinstance(self.partition, Tensor):
            _check_choice("partition", self.partition, get_args(PartitionMethod))
        if isinstance(self.balance, str):
            _check_choice("balance", self.balance, ("measured", "uniform"))
        _check_choice("start_method", self.start_method, get_args(StartMethod))
        if not self.cross_chunk_grad_scale >= 0:
            _refuse(
                "'cross_chunk_grad_scale' to be at least 0",
                self.cross_chunk_grad_scale,
                "1 is the exact gradient of the stale function, 2 the paper's.",
            )
        if isinstance(self.history_dtype, str):
            _check_choice("history_dtype", self.history_dtype, get_args(DtypeName))
        elif self.history_dtype is not None and not self.history_dtype.is_floating_point:
            _refuse(
                "'history_dtype' to be a floating-point dtype",
                self.history_dtype,
                "Use torch.bfloat16, for instance.",
            )
        _check_device(self.history_device)
        if self.history_device is not None and self.graph_parallel > 1:
            _refuse(
                "'history_device' to be None where the graph is split over shards",
                self.history_device,
                "Leave it out, or use graph_parallel=1.",
            )
        _check_choice("halo_codec", self.halo_codec, get_args(CodecName))
        _check_choice("cut_codec", self.cut_codec, get_args(CodecName))
        if not 0 <= self.halo_momentum < 1:
            _refuse(
                "'halo_momentum' to be from 0 to below 1",
                self.halo_momentum,
                "0 uses what arrived last as it is; PipeGCN's is 0.95.",
            )
        if not isinstance(self.timeout, timedelta) or self.timeout <= timedelta(0):
            _refuse(
                "'timeout' to be a positive datetime.timedelta",
                self.timeout,
                "Write timedelta(minutes=10), for instance.",
            )

    def for_engine(self, seed: int, *, is_fitting: bool) -> EngineOptions:
        """Return what the engine is told of them.

        Args:
            seed: Of the run.
            is_fitting: Whether the run trains.
        """
        balance = self.balance
        if balance == "measured" and not is_fitting:
            balance = "uniform"  # stages run one after the other in exact passes
        return EngineOptions(
            ChunkOptions(self.num_chunks, self.partition, seed),
            self.histories,
            self.shuffle_chunks,
            balance,
            seed,
            is_fitting,
            self.self_check,
            self.messages,
        )

    @property
    def messages(self) -> MessageOptions:
        """How ranks send rows to each other."""
        return MessageOptions(self.halo_codec, self.cut_codec, self.async_halo, self.halo_momentum)

    @property
    def histories(self) -> HistoryOptions:
        """How histories are kept."""
        device = None if self.history_device is None else torch.device(self.history_device)
        dtype = self.history_dtype
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        return HistoryOptions(self.cross_chunk_grad_scale, self.recompute, dtype, device)

    def resolve_num_stages(self, world_size: int) -> int:
        """Return S: there are S x `graph_parallel` processes.

        Raises:
            ConfigError: If there are not.
        """
        shards = self.graph_parallel
        if world_size % shards:
            _refuse(
                f"'graph_parallel' to divide the number of processes, {world_size}",
                shards,
                f"Use Trainer(devices={shards}) for one stage, or a multiple of it for more.",
            )
        if self.num_stages not in ("auto", world_size // shards):
            needed = self.num_stages * shards
            _refuse(
                f"'num_stages' to be {world_size // shards}: the number of processes, {world_size}"
                f"{f', over graph_parallel={shards}' if shards > 1 else ''}",
                self.num_stages,
                f"Use Trainer(devices={needed}), or num_stages='auto'.",
            )
        return world_size // shards

    def expect_num_chunks(self, num_stages: int) -> int:
        """Return K as far as it is known before the graph is."""
        if isinstance(self.partition, Tensor):
            return int(self.partition.max()) + 1 if self.partition.numel() else 1
        return CHUNKS_PER_STAGE * num_stages if self.num_chunks == "auto" else self.num_chunks


def _check_count(name: str, value: object, limit: str) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "auto" and not is_count:
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
        _refuse(f"'{name}' to be one of {', '.join(choices)}", repr(value), "Choose one of them.")


def _refuse(expected: str, found: Any, remedy: str) -> None:
    raise ConfigError(explain(expected=expected, found=str(found), remedy=remedy))

"""The Lightning strategy: its options, and what users ask it for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision

from lightning_gnnpipe.chunks import PipelineStats
from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.errors import checks_names
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.planning import PipelinePlan, plan_pipeline
from lightning_gnnpipe.staleness import Staleness
from lightning_gnnpipe.steps import Controls
from lightning_gnnpipe.trainer.hooks import PipelineHooks
from lightning_gnnpipe.types import (
    Balance,
    CodecOption,
    DtypeName,
    Partition,
    RepeatOption,
    StalenessName,
    StartMethod,
    Weights,
)


class GNNPipeStrategy(PipelineHooks):
    """Trains a GNN on the whole graph, with its layers in stages on several devices.

    Chunks of the graph flow through the stages, or micro-batches of a batch of many graphs.
    Source: GNNPipe (arXiv 2308.10087).

    Most runs set `num_chunks` at most. All options, by what they are for:

    - devices: `num_stages`, `graph_parallel`, `data_parallel`, `balance`, `pipelined_module`
    - chunks: `num_chunks`, `partition`, `plan_folder`, `staleness`
    - what is sent: `halo_codec`, `cut_codec`, `async_halo`, `repeat_encoder`, `weights`
    - memory: `memory_gib`, `recompute`, `history_dtype`, `history_device`, `table_folder`,
      `exact_in_chunks`
    - the run: `cuda_graphs`, `self_check`, `timeout`, `start_method`, `process_group_backend`

    Args:
        num_stages: Stages, S. "auto" (default): devices / (`graph_parallel` x `data_parallel`).
            Each stage needs at least one message-passing layer.
        graph_parallel: Shards of the graph, G. Each stage has G processes, which split every chunk
            and exchange activations of boundary nodes. With one stage this is graph parallelism.
            `gnnpipe plan` says which S and G are best for a number of devices.
        data_parallel: Replicas of the pipeline, R, for batches of graphs. They train on different
            batches and average their gradients, as in DDP. There are R x S x G processes.
        num_chunks: Chunks of the graph, K. With 1 training is exact, and stages do not overlap.
            "auto" (default) takes 1 on one stage. On several it takes the least number, of 1 to 16
            per stage, whose measured time is within 5 % of the best; a resumed run keeps it. Where
            nothing is measured it takes 4 per stage: for batches, with `recompute`, and in
            `Trainer(deterministic=True)`. For batches of many graphs: micro-batches, at most one
            for each graph with nodes.
            Options that act on chunks alone, such as `partition` or `history_dtype`, make "auto"
            take as many on one stage: training on one device is approximate then.
        partition: Assigns nodes to chunks: "metis", "kaminpar" (a package to install: less time
            and memory), "random", "contiguous", or an integer tensor `[num_nodes]` with the chunk
            of each node.
        plan_folder: Keeps partitions by the content of the graph, so that later runs on it start
            without METIS. Over 4 GiB the least recently used go. Several runs may share the folder.
            None: not kept.
        staleness: What to read of neighbours in other chunks that have not run in this step.
            "drift" (default): their last embeddings, moved by the mean change of those that have
            run. "constant": their last embeddings. "gnnpipe", as in the paper: their embeddings in
            a snapshot that is renewed every 23 steps.
            Stale embeddings get no gradient. With "gnnpipe" the gradients of fresh embeddings of
            other chunks count twice instead. With "drift" they do so in layers whose messages are
            no weighted sum, such as attention, and in all layers if more than 70 % of the edges lie
            between chunks. With "constant" they never do.
        pipelined_module: Name of the submodule to pipeline, or of a method such as "net.encode".
            None: the smallest submodule that holds all message passing.
        balance: Assigns layers to stages: "measured" (by a few timed passes), "uniform", or the
            number of layers of each stage, such as [20, 12].
        halo_codec: Encodes activations, and their gradients, that shards send each other in
            pipelined steps: "fp32" (unchanged), "bf16" (rounded), "int8" or "int1" (8 or 1 bits per
            value, rounded at random without bias). A pair: activations, gradients. Take "bf16" at 1
            to 10 Gbit/s, "int8" at 100 Mbit/s. Needs `graph_parallel` of 2 or more.
        cut_codec: Encodes activations, and their gradients, that stages send each other in
            pipelined steps; values as for `halo_codec`. Needs several stages.
        async_halo: Use activations and gradients of other shards of one epoch ago, while the
            present ones travel (PipeGCN, Sylvie-A). `BoundedStaleness` makes some epochs
            synchronous. Needs `graph_parallel` of 2 or more.
        repeat_encoder: Let stages compute again what an encoder makes of the batch node by node,
            such as GCNII's X_0, instead of receiving it. True: wherever that is possible. "auto":
            where it sends fewer bytes and is cheap, as a linear layer on up to 511 features is.
            Not for batches of many graphs.
        weights: "whole": every rank holds and updates all weights, and stages send each other their
            gradients, as under DDP. "staged": weights of other stages are empty on a rank, and
            gradients travel only of weights that several ranks use: for wide layers on small
            graphs. See `gathered`.
        recompute: Recompute activations in backward instead of keeping them: less memory, one more
            forward pass, the same numbers, dropout included. With several chunks exact steps then
            take the most memory; `exact_in_chunks` bounds it.
        history_dtype: Dtype of histories. `torch.bfloat16` halves them and rounds what is read.
            None: as computed.
        history_device: Device of histories, such as "cpu" when GPU memory is short: every read is a
            transfer then. None: where the layers compute. Not with `graph_parallel`.
        table_folder: Keeps histories and their gradients, matrices of the edges, and with
            `exact_in_chunks` the inputs of layers, in memory-mapped files in this folder. The
            system writes them out when memory is short; the numbers stay the same. The files vanish
            with the run. It takes 1.1 to 1.5 times the time. None: in memory. Not with
            `graph_parallel`.
        cuda_graphs: Replay a chunk's forward, and its backward, by one launch each (CUDA graphs):
            for many chunks of small layers. Not tested on a GPU yet. Not with `recompute`, shards,
            `history_device` or `table_folder`. Steps that a StalenessMonitor
            records run without.
        exact_in_chunks: False: exact passes (evaluation, first and warm-up steps) run on the whole
            graph at once. True: they run layer by layer over the chunks, in less memory and 1.3 to
            4 times the time: the same numbers, but for which values dropout drops. On one stage all
            training steps are exact then. Graphs of other sizes are evaluated at once.
            Not with shards.
        memory_gib: GiB that a process may take, beside Python and its libraries. Fit predicts its
            peak and, until it fits, chooses num_chunks, recompute, history_dtype="bfloat16" and
            exact_in_chunks, unless they are given; it refuses what would not fit. None (default):
            no limit. On CPUs it gives freed memory back at once; steps may take twice as long.
            Without effect on batches of graphs; refused for shards, which `plan(memory_gib=...)`
            compares.
        self_check: Compare the module in chunks with the whole module on a small graph before
            training, forward and backward, and refuse it where they differ.
        timeout: Longest wait for another rank before the run ends, a `timedelta`.
        start_method: "popen" (runs the script again; forks in notebooks) or "fork".
        process_group_backend: Backend of torch.distributed. None: the device's default.
        accelerator: This and all that follow are Lightning's; the Trainer's arguments set them.
        parallel_devices: Devices of this machine, one for each of its processes.
        cluster_environment: Starts the processes, or knows how they find each other.
        checkpoint_io: Writes and reads checkpoints.
        precision_plugin: Dtypes of computation.

    Raises:
        ConfigError: If an option is invalid, or no longer exists.

    Examples:
        >>> import lightning as L
        >>> from lightning_gnnpipe import EmbeddingRefresh, GNNPipeStrategy, StalenessWarmup
        >>> trainer = L.Trainer(
        ...     accelerator="cpu",
        ...     devices=2,
        ...     strategy=GNNPipeStrategy(num_chunks=8),
        ...     callbacks=[StalenessWarmup(num_epochs=5), EmbeddingRefresh(every_n_epochs=1)],
        ... )
    """

    @checks_names
    def __init__(
        self,
        *,
        num_stages: int | Literal["auto"] = "auto",
        graph_parallel: int = 1,
        data_parallel: int = 1,
        num_chunks: int | Literal["auto"] = "auto",
        partition: Partition = "metis",
        plan_folder: str | Path | None = None,
        staleness: StalenessName = "drift",
        pipelined_module: str | None = None,
        balance: Balance = "measured",
        halo_codec: CodecOption = "fp32",
        cut_codec: CodecOption = "fp32",
        async_halo: bool = False,
        repeat_encoder: RepeatOption = "auto",
        weights: Weights = "whole",
        recompute: bool = False,
        history_dtype: torch.dtype | DtypeName | None = None,
        history_device: torch.device | str | None = None,
        table_folder: str | Path | None = None,
        cuda_graphs: bool = False,
        exact_in_chunks: bool = False,
        memory_gib: float | None = None,
        self_check: bool = True,
        timeout: timedelta = timedelta(minutes=10),
        start_method: StartMethod = "popen",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = locals()
        options = StrategyOptions(**{f.name: given[f.name] for f in fields(StrategyOptions)})
        super().__init__(
            options,
            process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def __repr__(self) -> str:  # quoted by the Trainer of pytorch_lightning, which refuses it
        return "<GNNPipeStrategy, for the Trainer of lightning.pytorch, not of pytorch_lightning>"

    @property
    def engine(self) -> PipelineEngine:
        """The engine of the present run; a ConfigError outside of one."""
        return self._host.engine

    @property
    def controls(self) -> Controls:
        """Requests of callbacks for the next training step."""
        return self._host.controls

    def collect_stats(self) -> PipelineStats:
        """Return bytes, bubble share and timeline of the last training step; call on every rank.

        Returns:
            A `PipelineStats`.
        """
        return self.engine.last_step.stats()

    def collect_staleness(self) -> dict[int, Staleness]:
        """Return the stale reads of the last training step, by layer from 0; call on every rank.

        The step must be recorded: a `StalenessMonitor` does that, or
        `controls.records_staleness = True` before the step.

        Returns:
            A `Staleness` by layer.
        """
        return self.engine.last_step.staleness()

    def gathered(self) -> AbstractContextManager[None]:
        """Have whole weights on every rank within the block, with `weights="staged"`; collective.

        Changes in place that all ranks make are kept. With `weights="whole"` it does nothing.
        """
        return self._gathered()

    def plan(
        self,
        module: pl.LightningModule,
        data: Any,
        *,
        num_stages: int | None = None,
        num_shards: int | None = None,
        num_devices: int | None = None,
        link_gbit_per_s: float | None = None,
        message_us: float | None = None,
        memory_gib: float | None = None,
    ) -> PipelinePlan:
        """Return how ``module`` and ``data`` would be cut, and what a training step would take.

        Print it: it shows one device with one chunk beside all layouts, and says what to take. What
        training would refuse is refused. The plan is for ``num_stages`` stages of ``num_shards``
        shards, or for the best layout of ``num_devices`` devices.

        Args:
            module: Its ``training_step`` runs up to its call of the pipelined module.
            data: A graph, a data set of one, a data module, or a loader.
            num_stages: Stages, S; 2 if ``num_devices`` is not given either.
            num_shards: Shards, G, of each stage; None for the strategy's ``graph_parallel``. Not
                with ``num_devices``.
            num_devices: Devices to assign to stages and shards, instead of ``num_stages``.
            link_gbit_per_s: Gbit/s between machines, each way. None: all devices share this
                machine and its cores; 10 Gbit/s are assumed, on CPUs 1 between shards.
            message_us: Microseconds of a message of any size; None for 1,400, gloo's while all
                cores compute.
            memory_gib: Memory of a device, in GiB, that a layout must fit into; None for the
                strategy's.

        Returns:
            A `PipelinePlan`. `plan.best` is the layout to take, `plan.advice` says why.

        Raises:
            ConfigError: If ``training_step`` cannot run outside of a Trainer.
            GNNPipeError: As training would.
        """
        return plan_pipeline(
            module,
            data,
            self.options,
            num_stages=num_stages,
            num_shards=num_shards,
            num_devices=num_devices,
            link_gbit_per_s=link_gbit_per_s,
            message_us=message_us,
            memory_gib=memory_gib,
        )

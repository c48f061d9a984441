"""The Lightning strategy: Lightning's hooks on one side, the engine on the other, no algorithm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_gnnpipe.chunks import PipelineStats
from lightning_gnnpipe.options import BalanceOption, StrategyOptions
from lightning_gnnpipe.planning import PipelinePlan, plan_pipeline
from lightning_gnnpipe.staleness import Staleness
from lightning_gnnpipe.steps import batch_number, graph_of_node, num_nodes
from lightning_gnnpipe.trainer import (
    PipeLoops,
    _compat,
    check_optimizers,
    check_scaling,
    check_sync,
    check_was_called,
    loss_scale,
    print_stages,
    random_state,
    shows_stages,
)
from lightning_gnnpipe.types import (
    ChangingInputs,
    CodecOption,
    CrossChunkEdges,
    DtypeName,
    OrderName,
    Partition,
    RepeatOption,
    ScheduleName,
    StalenessName,
    StartMethod,
)

log = logging.getLogger(__name__)


class GNNPipeStrategy(PipeLoops):
    """Trains a GNN on the whole graph, its layers in stages on several devices.

    Chunks of the graph are in flight between the stages; of a batch of many graphs, micro-batches.

    Source: GNNPipe (arXiv 2308.10087).

    Args:
        num_stages: Stages, S; "auto" for as many as there are devices for.
        data_parallel: Replicas, R: so many pipelines, each with other batches of graphs, whose
            gradients are averaged, as in DDP. There are R x S processes.
        graph_parallel: Shards of the graph, G: each stage has that many of the S x G processes,
            which split every chunk and swap rows of neighbours; graph parallelism with one stage.
            `gnnpipe plan` says what is best for a number of devices.
        num_chunks: Chunks of the graph, K, at most the number of nodes; "auto" for 4 a stage. With
            1 nothing overlaps, and no row is stale. Of a batch of many graphs: micro-batches, at
            most as many as it has graphs with nodes.
        partition: How nodes are assigned to chunks: "metis", "random", "contiguous", or an integer
            tensor `[num_nodes]` with the chunk of each node.
        cross_chunk_edges: "drop" trains on the graph without its edges between chunks, in warm-up
            epochs as well, as a graph that was split by hand would be: nothing is stale, and no
            histories are kept (but for norms over all nodes). Validation, test and predict read all
            edges. "keep" is the method of the paper. Graphs of a batch have no such edges.
        chunk_order: "shuffled" (drawn anew in each epoch, the paper's technique 1) or "fixed".
        staleness: How to handle rows of neighbours that have not run in this step. "drift": read
            the last ones as constants, moved by the mean change of the rows that have run; those of
            validation where that has just run on the same weights. In layers with attention or
            other messages that are no weighted sum, and in all layers if more than 70 % of all
            edges lie between chunks, gradients of fresh rows of other chunks count twice, since
            stale rows get none. "constant": the last ones, as constants. "gnnpipe":
            the paper's recipe, a snapshot renewed every 23 steps and all gradients of fresh rows of
            other chunks twice.
        guard: Make one step exact, and warn, after the training loss has jumped far above the last
            50 after a pipelined step; at most one step in 20.
        changing_inputs: What a training step does whose inputs no earlier step had: other features,
            masks, options of the pipelined module, buffers in it. "exact": it runs exactly, since
            rows of neighbours are read only from steps on the same input; an input that comes again
            is pipelined from its third step on. "allow": it reads rows that were computed from
            other inputs. That is for small augmentation only: with masks of known labels among the
            inputs, stale rows leak the labels that a step hides.
        pipelined_module: Name of the submodule to pipeline; None for the smallest that holds all
            message passing.
        balance: How layers are assigned to stages: "measured" (by a few timed passes), "uniform",
            or the number of layers of each stage.
        halo_codec: How rows, and their gradients, are sent between shards of the graph in steps
            that need not be exact: "fp32" as they are, "bf16" rounded, "int8" or "int1" with so
            many bits a value, rounded at random so that the mean is right. A pair is one for rows,
            one for gradients.
        cut_codec: The same for what stages send each other.
        async_halo: Use others' rows and gradients of an epoch ago, while the present ones travel
            (PipeGCN, Sylvie-A).
        repeat_encoder: Let stages compute again what an encoder makes of the batch row by row, as
            GCNII's X_0, rather than to receive it and send its gradient back; its weights'
            gradients are summed over stages. True: wherever that is possible. "auto": where it
            spares bytes and uses at most 128 weights for each byte of a row. Batches of many graphs
            repeat nothing.
        schedule: In which order batches of many graphs go forward and back. "fill_drain": all
            micro-batches forward, then all back. "1f1b": a micro-batch goes back as soon as it has
            come out, so that each rank keeps no more of them than there are stages; the last one
            evaluates `training_step` for each. "interleaved": the same with several stages a rank,
            which are idle for less time and send more.
        num_virtual: Stages of each rank, V, if interleaved: stage `s` is on rank `s % R` of R.
        recompute: Do not keep activations but compute them again in backward: less memory, more
            time, the same numbers. Dropout repeats; histories are read as they were.
        history_dtype: Keep histories, and the gradients that linear layers exchange, in this dtype,
            such as `torch.bfloat16` or "bfloat16"; what is read of them is rounded. None: as
            computed.
        history_device: Keep histories there, such as on "cpu" when GPU memory is short; every read
            is a transfer. None: where the layers compute.
        self_check: Try the module out on a small graph before training, chunks against whole,
            forward and backward, and refuse it where they differ.
        timeout: Longest wait for another rank before the run ends.
        start_method: How processes are started: "popen" (runs the script again), "spawn", "fork",
            "forkserver".
        save_distributed_checkpoint: Write a checkpoint as a folder, each rank its own weights, by
            torch.distributed.checkpoint, rather than one stock file by the first rank.
        process_group_backend: Of torch.distributed; None for the device's own.
        accelerator: What computes. This and all that follow are Lightning's; None leaves them to
            the Trainer's arguments.
        parallel_devices: Devices of this machine, one for each of its processes.
        cluster_environment: Who starts the processes, and how they find each other.
        checkpoint_io: How checkpoints are written and read.
        precision_plugin: In which dtypes is computed.

    Raises:
        ConfigError: If an option cannot be right.
    """

    def __init__(
        self,
        *,
        num_stages: int | Literal["auto"] = "auto",
        graph_parallel: int = 1,
        data_parallel: int = 1,
        num_chunks: int | Literal["auto"] = "auto",
        partition: Partition = "metis",
        cross_chunk_edges: CrossChunkEdges = "keep",
        chunk_order: OrderName = "shuffled",
        staleness: StalenessName = "drift",
        guard: bool = True,
        changing_inputs: ChangingInputs = "exact",
        pipelined_module: str | None = None,
        balance: BalanceOption = "measured",
        halo_codec: CodecOption = "fp32",
        cut_codec: CodecOption = "fp32",
        async_halo: bool = False,
        repeat_encoder: RepeatOption = "auto",
        schedule: ScheduleName = "fill_drain",
        num_virtual: int = 2,
        recompute: bool = False,
        history_dtype: torch.dtype | DtypeName | None = None,
        history_device: torch.device | str | None = None,
        self_check: bool = True,
        timeout: timedelta = timedelta(minutes=10),
        start_method: StartMethod = "popen",
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        options = StrategyOptions(
            num_stages,
            num_chunks,
            partition,
            chunk_order,
            staleness,
            pipelined_module,
            balance,
            recompute,
            history_dtype,
            history_device,
            self_check,
            timeout,
            start_method,
            save_distributed_checkpoint,
            graph_parallel,
            data_parallel,
            halo_codec,
            cut_codec,
            async_halo,
            repeat_encoder,
            cross_chunk_edges,
            schedule,
            num_virtual,
            guard,
            changing_inputs,
        )
        super().__init__(
            options,
            process_group_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._undo: list[Callable[[], None]] = []  # what a run has changed outside of the strategy

    def __repr__(self) -> str:
        # What the Trainer of the other package quotes, which takes strategies of its own alone.
        return "<GNNPipeStrategy, for the Trainer of lightning.pytorch, not of pytorch_lightning>"

    def collect_stats(self) -> PipelineStats:
        """Return bytes, bubble share and timeline of the last training step; call on every rank."""
        return self.engine.last_step.stats()

    def collect_staleness(self) -> dict[int, Staleness]:
        """Return who read whom stale in the last training step, by layer; call on every rank."""
        return self.engine.last_step.staleness()

    def plan(self, module: pl.LightningModule, data: Any, **options: Any) -> PipelinePlan:
        """Return how training would be cut and what a step would take; see `plan_pipeline`.

        With `num_devices=8` it is cut for the best of all layouts of eight devices, and its `best`
        says which one that is.
        """
        return plan_pipeline(module, data, self.options, **options)

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        assert self.lightning_module is not None
        check_sync(_compat.syncs_norms(self), self.options.data_parallel)
        self.accelerator.setup(trainer)
        if self.options.data_parallel == 1:
            self._undo += [_compat.keep_samplers(trainer), _compat.without_wrong_advice()]
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        idle = self.options.idle_in_one_chunk
        if idle and is_fitting and self.is_global_zero:
            names = ", ".join(idle)
            log.warning("With num_chunks=1 nothing is cut or stale: %s change nothing.", names)
        self._attach(self.lightning_module, is_fitting)
        self._signals.attach(trainer, self.engine.progress)
        self.engine.on_signals = self._signals.agree
        if is_fitting and shows_stages(trainer):
            self.engine.model.on_split = partial(print_stages, trainer, self.engine.model.module)
        if is_fitting:
            self.reset_optimizers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            _compat.optimizers_to_device(self.optimizers, self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self._pipe.mesh.num_stages if self.is_global_zero else 1)
        self._serve_optimizers()

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        if self._has_peers:
            assert self.lightning_module is not None
            self._precision.attach(
                self.precision_plugin, self.lightning_module, self.engine.model, self._pipe
            )
        check_scaling(self.precision_plugin, self.options.async_halo)
        self.engine.progress.loss_scale = partial(loss_scale, self.precision_plugin)

    def teardown(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._detach()
        super().teardown()

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        self.engine.progress.batch_number = partial(batch_number, batch, self.engine.contents)
        self.engine.progress.graph_of_node = graph_of_node(batch)
        self.engine.progress.num_nodes = partial(num_nodes, batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._signals.requeue()
        self.engine.abandon()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        engine.identity.begin_step(self.lightning_module, partial(random_state, self.root_device))
        engine.progress.step_index = trainer.fit_loop.epoch_loop.total_batch_idx
        engine.model.reads.settle()
        self._share_buffers()
        if _compat.skips_backward(trainer):  # histories are of the weights before averaging
            self.controls.is_exact = True
            engine.statistics.stale.clear()  # Lightning computes them anew
        passes = engine.num_training_passes
        if engine.batches.needs_loss:
            self._prepare_replay(super().training_step, args)
        output = super().training_step(*args, **kwargs)
        engine.batches.early_loss.run = None
        self.controls.reset()  # what callbacks ask for is for one step
        was_called = engine.num_training_passes > passes
        check_was_called(self._prefix, was_called)
        engine.model.reads.forget_foreign_states()
        loss = output.get("loss") if isinstance(output, dict) else output
        engine.note_loss(float(loss.detach()) if isinstance(loss, Tensor) else 0.0)
        if self._has_stages:
            engine.model.reads.meet("end training_step")
        return output

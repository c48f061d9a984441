"""Attaches the engine to the user's module when a loop starts, and detaches it at the end.

It takes over once a loop starts, not before. Until then every rank holds the whole module. What
runs it earlier, such as a model summary with an example input or a logger that draws the model, on
one rank alone, gets its own forward.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from torch import nn

from lightning_gnnpipe.controls import Controls
from lightning_gnnpipe.engine import PipelineEngine
from lightning_gnnpipe.layers import check_support
from lightning_gnnpipe.report import describe_stages, format_stages
from lightning_gnnpipe.stages import Stage, find_pipelined
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer.launcher import set_random_state
from lightning_gnnpipe.trainer.loaders import NextBatch
from lightning_gnnpipe.trainer.precision import StagePrecision
from lightning_gnnpipe.trainer.refuse import check_pruning, check_sharded
from lightning_gnnpipe.trainer.replay import StepReplay, check_replay
from lightning_gnnpipe.trainer.replicas import PipelineMetrics, PipeReplicas
from lightning_gnnpipe.trainer.weight_callbacks import GuestCallbacks, HookEnds, owners_of_hooks

log = logging.getLogger(__name__)


class PipeLoops(PipeReplicas):
    """Puts the engine behind the pipelined module's forward at the start of each loop.

    Args:
        args: Of `PipeReplicas`, as are `kwargs`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.controls = Controls()
        self._metrics = PipelineMetrics()
        self._guests = GuestCallbacks()
        self._precision = StagePrecision()
        self._next_batch = NextBatch()
        self._hook_ends = HookEnds()
        self._unserve: list[Callable[[], None]] = []

    def on_train_start(self) -> None:
        super().on_train_start()
        self._take_over()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.engine.abandon()
        self.engine.progress.is_validating = True
        self._begin_stream()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._begin_stream()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._begin_stream()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._end_stream()
        self.engine.progress.is_validating = False
        self.engine.note_validation()

    def on_test_end(self) -> None:
        super().on_test_end()
        self._end_stream()

    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._end_stream()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step(*args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step(*args):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step(*args):
            return super().predict_step(*args, **kwargs)

    def _begin_stream(self) -> None:
        self._take_over()
        if self._has_peers:
            self._next_batch.attach(self.lightning_module.trainer)  # type: ignore[union-attr]

    def _end_stream(self) -> None:
        self._next_batch.detach()
        self.engine.stream.end()

    @contextmanager
    def _in_step(self, batch: Any, *others: Any) -> Iterator[None]:
        """Let the engine know what the user's step gets, and what the next one will."""
        self.engine.model.reads.settle()
        self.engine.stream.enter_step(batch, lambda: self._next_batch.peek(self.root_device))
        try:
            yield
        finally:
            self.engine.stream.leave_step()

    def _take_over(self) -> None:
        if not self.engine.is_attached:
            self.engine.attach()

    def _prepare_replay(self, step: Callable[..., Any], args: Sequence[Any]) -> None:
        """Let the engine run a training step again on outputs that have come out early."""
        module, pipelined = self.lightning_module, self.engine.model.module
        assert module is not None
        reads = self.engine.model.reads

        def step_again(*args: Any) -> Any:
            with reads.refusing("Use schedule='fill_drain', or the optimizer's weight_decay."):
                return step(*args)

        with reads.inside():
            replay = StepReplay(module, pipelined, step_again, args, self.root_device)
        self.engine.batches.early_loss.run = replay

    def _attach(self, module: pl.LightningModule, is_fitting: bool) -> None:
        """Make the engine of the pipelined module; it takes over when a loop starts."""
        options = self.options
        self._prefix, pipelined = find_pipelined(module, options.pipelined_module)
        check_support(pipelined, 1)  # what chunks need is checked once it is known what they are of
        seed = self._share_start(module)
        saved, self._saved = self._saved, None
        if saved is not None:
            run, random = saved
            seed = run.state.seed
            set_random_state(random, self.root_device)
        engine_options = options.for_engine(seed, self.world_size, is_fitting=is_fitting)
        self._engine = PipelineEngine(pipelined, self._pipe, engine_options, self.controls)
        inside = {id(one) for one in pipelined.modules()}
        outside = ((name, one) for name, one in module.named_modules() if id(one) not in inside)
        self._engine.model.shared_outside = {
            id(parameter): f"{name}.{own}" if name else own
            for name, one in outside
            for own, parameter in one.named_parameters(recurse=False)
        }
        if saved is not None:
            self._engine.resume(run)
        elif self._ended is not None and not is_fitting:
            self._engine.model.prefer(self._ended.stage_layers)
        if is_fitting and engine_options.schedule != "fill_drain":
            check_replay(module)
        callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        averages = any(_compat.average_of(one) is not None for one in callbacks)
        self._engine.progress.averages_weights = averages
        if not averages:
            self._engine.progress.validates_next = partial(_compat.validates_next, module.trainer)
        self._metrics.attach(module, self._gather_metrics())
        if self._has_peers:
            self._serve_guests(callbacks)
        if self._has_stages:
            reads = self._engine.model.reads
            reads.is_closed = lambda: self._is_interrupted
            owners = self._everyone.all_gather_objects(list(owners_of_hooks(module.trainer)))
            everywhere = set.intersection(*map(set, owners))

            def meet(name: str) -> None:
                # No other rank comes to a hook of this rank's callback, nor after an error.
                if name.rpartition(".")[0] in everywhere and not self._is_interrupted:
                    reads.meet(f"end {name}")

            self._hook_ends.attach(module.trainer, meet)

    def _serve_optimizers(self) -> None:
        if self._has_stages:
            reads = self.engine.model.reads
            self._unserve += [reads.serve(optimizer) for optimizer in self.optimizers]

    def _serve_guests(self, callbacks: list[pl.Callback]) -> None:
        check_sharded(callbacks, self.options.save_distributed_checkpoint)
        if self._has_stages:
            check_pruning(callbacks)
        for average in filter(None, map(_compat.average_of, callbacks)):
            self._share_weights(average)
        self._guests.attach(
            callbacks, self.engine.model, self._prefix, lambda: self._is_interrupted
        )

    def _detach(self) -> None:
        """Give the user's module, and everything else that was changed, back as it was."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        if engine.options.is_fitting:
            self._ended = engine.run_state().without_histories()
        engine.detach()
        self._hook_ends.detach()
        if engine.model.is_split and not self._is_interrupted:
            engine.model.reads.gather_states()
        while self._unserve:
            self._unserve.pop()()
        if not self._is_interrupted:
            engine.statistics.warn()
            engine.tell_changes()
        self._precision.detach()
        self._guests.detach()
        self._metrics.detach()
        self.controls.reset()
        if not self._is_interrupted:
            engine.graphs.drop_histories()
            engine.model.restore()
            return
        if engine.model.placeholders():
            log.warning(
                "The module on rank %d holds the weights of one stage only, because the run was "
                "interrupted. Load the last checkpoint.",
                self.global_rank,
            )
        engine.model.forget()


def shows_stages(trainer: pl.Trainer) -> bool:
    """Whether the table is to be shown here: on the first rank, unless summaries are off."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return trainer.is_global_zero and any(isinstance(one, ModelSummary) for one in callbacks)


def print_stages(
    trainer: pl.Trainer,
    pipelined: nn.Module,
    stages: Sequence[Stage],
    users: Mapping[str, set[int]],
    costs: Sequence[float],
) -> None:
    """Print the table without breaking the progress bar; see `describe_stages`."""
    rows = describe_stages(trainer.lightning_module, pipelined, stages, users, costs)
    text = format_stages(rows, shutil.get_terminal_size().columns)
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar.is_enabled:
        bar.print(text)
    else:
        trainer.print(text)

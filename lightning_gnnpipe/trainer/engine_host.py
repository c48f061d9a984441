"""Puts the engine behind the pipelined module's method for a run, and runs the user's steps.

Only calls of the module within these steps are pipelined. What cannot work on stages or replicas is
refused below: optimizers, callbacks, loss scaling.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.utils.prune import is_pruned
from torch.optim import Optimizer

from lightning_gnnpipe.calls import Inputs, Kind
from lightning_gnnpipe.chunks import (
    LARGE_BYTES,
    StepCosts,
    num_cores,
    return_memory_at_once,
    threads_of_stage,
    uses_glibc_malloc,
)
from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.engine import PipelineEngine, RunState, SavedRun
from lightning_gnnpipe.errors import ConfigError, Fallbacks, UnsupportedError
from lightning_gnnpipe.graph import BatchPlan, ChunkPlan
from lightning_gnnpipe.layers import check_support, find_convs
from lightning_gnnpipe.options import RunOptions, StrategyOptions
from lightning_gnnpipe.passing import linear_rule, replace_attributes
from lightning_gnnpipe.planning import expect_steps, ranks_at_once, write_layout
from lightning_gnnpipe.report import (
    CLOSE,
    TIMED_ALONE,
    LayerNames,
    Split,
    align,
    compare_weights,
    describe_split,
)
from lightning_gnnpipe.stages import as_written, find_pipelined, refuse_uncalled
from lightning_gnnpipe.steps import Controls, StagedWeights
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer.processes import (
    Processes,
    random_number,
    random_state,
    renew_seed,
    set_random_state,
)
from lightning_gnnpipe.trainer.replicas import Replicas

log = logging.getLogger(__name__)

_MUCH_BYTES = 2**20  # a step; less is not worth a warning


ResumedRun = tuple[SavedRun, Mapping[str, Any]]  # and the random states it was saved with


class EngineHost:
    """Makes the engine of a run, runs the user's steps with it, and takes it down."""

    def __init__(
        self,
        strategy: _compat.LightningStrategy,
        options: StrategyOptions,
        processes: Processes,
        replicas: Replicas,
    ) -> None:
        self._strategy, self._options = strategy, options
        self._processes, self._replicas = processes, replicas
        self.controls = Controls()  # requests of callbacks for the next training step
        self.last_run: RunState | None = None  # that trained, without histories
        self.last_random: Mapping[str, Any] = {}  # random states at its end
        self._engine: PipelineEngine | None = None
        self._patched = ExitStack()
        self._num_evaluations = 0  # of the loss, for the present batch

    @property
    def engine(self) -> PipelineEngine:
        """The engine of the present run; a ConfigError outside of one."""
        if self._engine is None:
            raise ConfigError(
                expected="a call while the Trainer runs",
                found="no run in progress",
                remedy="Call it in a hook such as on_train_epoch_end.",
            )
        return self._engine

    @property
    def is_running(self) -> bool:
        return self._engine is not None

    @property
    def is_staged(self) -> bool:
        """Whether stages hold their own weights alone in this run."""
        return self._engine is not None and self._engine.model.staged.root is not None

    @property
    def staged(self) -> StagedWeights | None:
        """The weights of stages while all ranks run; None after an error, and outside of a run."""
        is_alone = self._engine is None or self._processes.is_interrupted
        return None if is_alone else self.engine.model.staged

    def attach(self, trainer: pl.Trainer, resumed: ResumedRun | None) -> None:
        """Make the engine of one run."""
        module, options = trainer.lightning_module, self._options
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._strategy.syncs_norms and options.data_parallel > 1:
            _refuse(
                "sync_batchnorm=False with data_parallel",
                "sync_batchnorm=True, which has no effect: BatchNorm uses the statistics of each "
                "micro-batch",
                "Leave it out, or use LayerNorm or GraphNorm.",
            )
        if not self._replicas.are_several:
            self._patched.enter_context(_compat.keep_samplers(trainer))
        if self._processes.has_peers:
            self._patched.enter_context(_compat.without_signal_messages(trainer))
        if self._processes.has_peers and is_fitting and _compat.validates_by_time(trainer):
            _refuse(
                "'val_check_interval' to be a number of batches, on several devices",
                "a time, which passes differently on each rank",
                "Write Trainer(val_check_interval=n), or check_val_every_n_epoch=n.",
            )
        if is_fitting and options.idle_in_one_chunk and trainer.is_global_zero:
            names = ", ".join(options.idle_in_one_chunk)
            log.warning("With num_chunks=1 these options have no effect: %s.", names)
        self._fallbacks = Fallbacks(log, is_quiet=not trainer.is_global_zero)
        if compiled := self._patched.enter_context(as_written(module)):
            self._fallbacks.tell(
                "%s runs without torch.compile, since message passing on chunks cannot be "
                "compiled.",
                ", ".join(compiled),
            )
        saves_memory = options.memory_gib is not None or options.saves_memory
        is_on_host = self._strategy.root_device.type == "cpu"
        if is_fitting and is_on_host and saves_memory and not uses_glibc_malloc():
            self._fallbacks.tell(
                "Peaks of memory may be higher: memory_gib, exact_in_chunks and table_folder "
                "return memory through glibc's malloc, and another one is loaded."
            )
        if is_fitting and options.memory_gib is not None:
            return_memory_at_once()
        self._found = find_pipelined(module, options.pipelined_module)
        self._is_called, pipelined = False, self._found.module
        check_support(pipelined, 1)  # with one chunk; more are checked at the first forward
        seed = self._processes.share_start(module)
        if resumed is not None:
            run, random = resumed
            seed = run.state.seed
            set_random_state(random, self._strategy.root_device)
        transport = self._processes.transport
        run_options = RunOptions(options, transport.mesh.num_stages, seed, is_fitting)
        engine = PipelineEngine(
            pipelined, transport, run_options, self.controls, self._found.method
        )
        self._engine, engine.model.root = engine, module
        self._processes.signals.begin_run()
        if options.weights == "staged" and is_fitting and transport.mesh.num_stages > 1:
            optimizers = partial(getattr, self._strategy, "optimizers")
            engine.model.staged.begin(module, optimizers)
            clip = {"clip_grad_by_norm": engine.model.staged.clip_by_norm}
            self._patched.enter_context(replace_attributes(self._strategy.precision_plugin, clip))
        engine.attach()
        if resumed is not None:
            engine.resume(run)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        averages = [one for one in map(_compat.average_of, callbacks) if one is not None]
        for average in averages:
            self._processes.share_weights(average)
        engine.set_step(averages_weights=bool(averages))
        self._patched.enter_context(self._replicas.computing_metrics())
        if is_fitting and trainer.is_global_zero:
            engine.model.on_split = partial(_tell_start, trainer, run_options)
            engine.model.say = partial(_say, trainer)

    def check_training(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers, loss scaling and callbacks that cannot work."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                refuse_evaluations(type(optimizer).__name__)
        has_scaler = getattr(self._strategy.precision_plugin, "scaler", None) is not None
        if has_scaler and self._options.async_halo:  # gradients of the last step had another scale
            _refuse(
                "async_halo=True without loss scaling",
                'precision="16-mixed", which changes the scale of gradients between steps',
                'Use "bf16-mixed", or async_halo=False.',
            )
        if self.is_staged:
            _check_staged(self._strategy.user_module.trainer, optimizers, has_scaler)

    def detach(self) -> None:
        """Undo `attach`."""
        if self._engine is None:
            self._patched.close()
            return
        engine, self._engine = self._engine, None
        is_interrupted = self._processes.is_interrupted
        try:
            engine.detach()
            if engine.options.is_fitting:
                self.last_random = random_state(self._strategy.root_device)
                renew_seed()
                self.last_run = engine.run_state().without_histories()
            staged = engine.model.staged
            staged.lose() if is_interrupted else staged.make_whole()
        finally:
            self._patched.close()
        if not is_interrupted:
            engine.statistics.warn()
            engine.graphs.inputs.tell_share(engine.num_training_passes)
        self.controls.reset()
        engine.graphs.inputs.drop_rows(waits=not is_interrupted)

    def begin_batch(self) -> None:
        self._processes.signals.requeue()
        self._num_evaluations = 0
        self.engine.state.abandon()

    def stop_early(self, *, is_end: bool) -> None:
        """Raise if `should_stop` makes only some ranks skip batches, which the rest begin.

        If no rank skips batches here, the next step agrees on `should_stop`.
        """
        trainer = self._strategy.user_module.trainer
        if self._processes.has_peers and _compat.skips_batches(trainer, is_end=is_end):
            self._processes.everyone.meet("stop early")

    def _begin_step(self) -> None:
        """Agree on signals, and go on with the first rank's random numbers.

        A hook on one rank alone, which calls a module with dropout, has drawn some there.
        """
        transport, signals = self.engine.transport, self._processes.signals
        trainer = self._strategy.user_module.trainer
        bits = signals.own(trainer)
        if not transport.world.is_distributed:
            signals.agree([bits], trainer)
            return
        over = transport if self.engine.step.is_uneven else transport.everyone
        device, size = self._strategy.root_device, transport.world.replica_size
        with transport.meter.paused():
            ranks = over.meet("begin a step", [bits, random_number(device)])
            signals.agree((bits for bits, _ in ranks), trainer)
            first = transport.world.rank // size * size if len(ranks) > size else 0
            if len({number for _, number in ranks[first : first + size]}) > 1:
                state = random_state(device)
                set_random_state(transport.broadcast_object(state), device)

    def end_validation(self) -> None:
        """Agree on signals that came after its last step began: perhaps no step follows."""
        processes, trainer = self._processes, self._strategy.user_module.trainer
        ranks = [[processes.signals.own(trainer)]]
        if processes.has_peers:
            ranks = processes.everyone.meet("end a validation", ranks[0])
        processes.signals.agree((bits for [bits] in ranks), trainer)
        processes.signals.obey()

    def training_step(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the user's training step; its pipelined forward trains."""
        engine, module = self.engine, self._strategy.user_module
        trainer = module.trainer
        self._begin_step()
        engine.identity.begin_step(module, partial(random_number, self._strategy.root_device))
        engine.set_step(step_index=trainer.fit_loop.epoch_loop.total_batch_idx)
        self._num_evaluations += 1
        if self._num_evaluations > 1:
            refuse_evaluations("an optimizer")
        if engine.transport.world.num_replicas > 1:
            self._replicas.share_buffers()
        if _compat.skips_backward(trainer):  # histories are of the weights before averaging
            self.controls.is_exact = True
            engine.statistics.stale.clear()  # Lightning computes them anew
        num_calls = engine.method.num_calls
        method = engine.method
        watched = nullcontext(list[Any]()) if self._is_called else method.watched(module)
        with watched as outside, engine.called_by("training"):
            output = step(*args)
        self._is_called |= engine.method.num_calls > num_calls
        self.controls.reset()  # requests are for one step
        if outside and not self._is_called:
            refuse_uncalled(module, self._found)
        if not self._is_called:
            self._fallbacks.tell(
                "The first training step does not call %s, and runs without the pipeline.",
                self._found.call,
            )
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:  # by manual optimization
            loss = None
        engine.loss = 0.0 if loss is None else float(loss.detach())
        self._processes.signals.obey()
        return output

    def backward(self, loss: Tensor, run: Callable[[], None]) -> None:
        """Run the user's backward of `loss`, before scaling; give all ranks equal gradients."""
        engine = self.engine
        if not bool(loss.isfinite().all()):
            epoch = self._strategy.user_module.trainer.current_epoch
            with self._strategy.precision_plugin.forward_context():
                engine.refuse_loss(float(loss.detach()), epoch)
        scaler = getattr(self._strategy.precision_plugin, "scaler", None)
        engine.set_step(loss_scale=1.0 if scaler is None else float(scaler.get_scale()))
        try:
            run()
        except RuntimeError as error:
            is_empty = "invalid gradient" in str(error) or "tensor b (0)" in str(error)
            if not self.is_staged or not is_empty:
                raise
            raise UnsupportedError(
                "The loss may read weights of the pipelined module: this rank holds some of them.\n"
                "Write weight_decay=... in the optimizer, or GNNPipeStrategy(weights='whole').\n"
                "Read weights, without gradients, in `with self.trainer.strategy.gathered():`."
            ) from error
        engine.share_gradients(self._strategy.user_module)

    def evaluation_step(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the user's step of validation, test or prediction."""
        self._begin_step()
        with self.engine.called_by("evaluation"):
            output = step(*args)
        self._processes.signals.obey()
        return output


def _tell_start(
    trainer: pl.Trainer,
    run: RunOptions,
    split: Split,
    costs: StepCosts | None,
    inputs: Inputs,
    plan: ChunkPlan | BatchPlan,
) -> None:
    """Say the layout, and what a step takes if `costs` were measured.

    Warn if another layout is faster, if stages wait for one layer, or if gradients of weights are a
    large part of what is sent. Say where another malloc would be faster.
    """
    root, options = trainer.lightning_module, run.given
    sent = split.step_bytes(root, get_codecs(options.cut_codec))
    extra = sent["whole"] - sent["staged"]
    if options.weights == "whole" and extra > max(0.5 * sent["staged"], _MUCH_BYTES):
        log.warning(
            "Stages send each other large gradients of weights. %s Write "
            "GNNPipeStrategy(weights='staged') to send fewer.",
            compare_weights(sent),
        )
    has_graphs = isinstance(plan, BatchPlan)
    text = describe_split(split, plan.num_chunks, has_graphs=has_graphs)
    is_one = (len(split.stages), split.num_shards, has_graphs) == (1, 1, False)
    asks = options.of_chunks or options.recompute or not isinstance(options.partition, str)
    if is_one and plan.num_chunks > 1 and not asks:
        text += " On one device num_chunks=1 is exact, and seldom slower."
    if costs is not None and split.num_shards == 1:
        num_ranks = ranks_at_once(inputs.edge_index.device, trainer.num_nodes)
        of_replica = num_ranks / options.data_parallel
        text += f" {_expect(split, costs, inputs, options, plan, of_replica)}"
        if trainer.world_size > num_ranks:
            number = trainer.num_nodes * num_cores()
            cores = "1 core" if number == 1 else f"{number} cores"
            text += f"\n{trainer.world_size} processes share {cores}, which takes longer still."
    _say(trainer, text + (f"\n{run.memory}" if run.memory else ""))
    if _clears_tensors(split, options, inputs, plan.num_chunks):
        _say(
            trainer,
            "Some tensors have more than 32 MiB, which glibc's malloc takes anew from the system "
            "at each use. With LD_PRELOAD=libtcmalloc_minimal.so.4 in the environment (Debian's "
            "libtcmalloc-minimal4) steps may take half the time.",
        )


def _clears_tensors(
    split: Split, options: StrategyOptions, inputs: Inputs, num_chunks: int
) -> bool:
    """Whether the system clears the memory of a chunk's largest tensors for each use."""
    saves_memory = options.memory_gib is not None or options.saves_memory
    if inputs.edge_index.device.type != "cpu" or saves_memory:
        return False
    layers = split.layers
    names = {*layers.outputs, *(name for crossing in layers.crossing for name in crossing)}
    values = [layers.values[name] for name in names]
    row_bytes = max((one.row_bytes for one in values if one.kind is Kind.NODE), default=0)
    num_rows, convs = inputs.num_nodes, find_convs(split.module).values()
    if any(linear_rule(conv) is None for conv in convs):  # it makes a message per edge
        num_rows = max((num_rows, *inputs.edge_sizes))
    return (
        row_bytes * num_rows > LARGE_BYTES * num_chunks * split.num_shards and uses_glibc_malloc()
    )


def _say(trainer: pl.Trainer, text: str) -> None:
    """Log `text`, or print it above the progress bar."""
    bar: Any = trainer.progress_bar_callback
    tell = bar.print if getattr(bar, "is_enabled", False) else rank_zero_info
    tell(text)


def _expect(
    split: Split,
    costs: StepCosts,
    inputs: Inputs,
    options: StrategyOptions,
    plan: ChunkPlan | BatchPlan,
    num_ranks: float,
) -> str:
    """Return what a step takes, beside other layouts; warn where the stages lose or wait."""
    if costs.is_disturbed:
        return "How long a step takes is not known: the machine was busy while layers were timed."
    times = expect_steps(split, costs, inputs, options, plan, num_ranks)
    num_stages, cores = len(split.stages), num_cores()
    alone_s = costs.alone_s(recompute=options.recompute)
    own, has_graphs = next(iter(times)), isinstance(plan, BatchPlan)
    takes_turns = num_stages > 1 and plan.num_chunks == 1 and not has_graphs
    if takes_turns and alone_s and threads_of_stage(split.num_shards) is not None:
        times[own] = min(times[own], alone_s)
    best, more = min(times, key=times.__getitem__), ""
    best_s = times[best]
    if 0 < alone_s < best_s:
        best, best_s, more = (1, 1, 1), alone_s, f", with {cores} threads"
    axis = "data" if has_graphs else "graph"
    if times[own] > CLOSE * best_s:
        log.warning(
            "The stages are not the fastest: a step takes about %.3f s, and %.3f s with %s%s.",
            times[own],
            best_s,
            write_layout(*best),
            more,
        )
    seconds = [one.compute_s for one in costs.at(plan.num_chunks).layers]
    if (slowest := max(seconds)) > 0.5 * sum(seconds) and len(seconds) > 1:
        log.warning(
            "The stages wait for '%s', which is %.0f %% of a step's cost and stays in one stage. "
            "Use fewer stages, or GNNPipeStrategy(num_stages=1, %s_parallel=%d).",
            LayerNames(split.module).of(split.layers.segments[seconds.index(slowest)]),
            100 * slowest / sum(seconds),
            axis,
            num_stages,
        )
    number, threads = torch.get_num_threads(), ""
    if inputs.edge_index.device.type == "cpu":
        threads = f", {number} thread{'s' if number > 1 else ''}"
        if not alone_s and num_stages > 1 and cores > number:
            threads += f" (it could use {cores})"
    one_device = "on one device with one chunk"
    names = "in these stages", one_device + threads, "by graph parallelism"
    rows = [(f"{one:.3f}", name) for one, name in zip(times.values(), names, strict=False)]
    if alone_s:
        rows.insert(2, (f"{alone_s:.3f}", f"{one_device}, {cores} threads"))
    lines = ["Expected seconds for a step:", *align(rows, left=1), TIMED_ALONE]
    one_s = min(times[1, 1, 1], alone_s or math.inf)
    if num_stages > 1 and times[own] <= CLOSE * best_s and one_s < CLOSE * times[own]:
        lines.append(f"One device may be as fast: {write_layout(1, 1, 1)}.")
    return "\n".join(lines)


def refuse_evaluations(name: str) -> NoReturn:
    """Refuse an optimizer that evaluates the loss several times per step."""
    _refuse(
        "an optimizer that evaluates the loss once per step",
        f"{name}, which evaluates it several times",
        "Use Adam, AdamW or SGD.",
    )


def _check_staged(trainer: pl.Trainer, optimizers: Iterable[Optimizer], has_scaler: bool) -> None:
    """Refuse what needs all weights or gradients, where stages hold their own alone."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = [type(one).__name__ for one in callbacks if isinstance(one, _compat.READERS)]
    found += ["torch.nn.utils.prune"] if is_pruned(trainer.lightning_module) else []
    for kind in map(type, optimizers):
        names = [base.__module__ for base in kind.__mro__ if base not in (Optimizer, object)]
        if not any(name.startswith("torch.optim.") for name in names):
            found.append(f"{kind.__name__}, which may need all weights of a step")
    found += ['precision="16-mixed", whose overflows all stages must see'] if has_scaler else []
    if found:
        _refuse(
            "callbacks that read no weights, an optimizer of torch.optim and no loss scaling, with "
            "weights='staged'",
            found[0],
            "Use GNNPipeStrategy(weights='whole'), the default.",
        )


def refuse_import(what: str = "Trainer") -> NoReturn:
    """Refuse an object of `pytorch_lightning`, the same code as `lightning` under other names."""
    raise ConfigError(
        expected=f"a {what} of the package 'lightning'",
        found="one of 'pytorch_lightning'",
        remedy="Write `import lightning as L`, and L.Trainer, L.LightningModule, "
        "L.pytorch.callbacks in place of the names of pytorch_lightning. All else stays.",
    )


def _refuse(expected: str, found: str, remedy: str) -> NoReturn:
    raise UnsupportedError(expected=expected, found=found, remedy=remedy)

"""Lightning's hooks of the strategy, in the order in which Lightning calls them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnnpipe.datamodule import check_loader
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.passing import replace_attributes
from lightning_gnnpipe.steps import stored_graph
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer._compat import LightningStrategy, PathLike
from lightning_gnnpipe.trainer.checkpoints import AtomicCheckpointIO, Checkpoints
from lightning_gnnpipe.trainer.engine_host import EngineHost
from lightning_gnnpipe.trainer.processes import Processes
from lightning_gnnpipe.trainer.replicas import Replicas


class PipelineHooks(LightningStrategy):
    """Lightning's hooks; each calls the part that does the work: processes, host, checkpoints."""

    def __init__(self, options: StrategyOptions, backend: str | None, **lightnings: Any) -> None:
        self.options = options
        super().__init__(**lightnings)
        self._processes = Processes(self, options, backend)
        self._replicas = Replicas(self, self._processes, options.data_parallel)
        self._host = EngineHost(self, options, self._processes, self._replicas)
        self._checkpoints = Checkpoints(self, self._processes, self._host)

    def _gathered(self) -> AbstractContextManager[None]:
        """Have whole weights on every rank within the block."""
        staged = self._host.staged
        return nullcontext() if staged is None else staged.gathered()

    # Set-up.

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of replicas, and the replica of this process."""
        return self._replicas.sampler_kwargs

    make_checkpoint_io = AtomicCheckpointIO

    def make_launcher(self) -> Any:
        return self._processes.make_launcher()

    def check_start(self, trainer: pl.Trainer, given: Sequence[object]) -> None:
        """Refuse, before processes start, what cannot run; `given` to the Trainer's method."""
        self._processes.check_start(trainer, given)

    def set_world_ranks(self) -> None:
        self._processes.set_ranks()

    def setup_environment(self) -> None:
        self._processes.begin()
        self._checkpoints.begin_run()
        super().setup_environment()
        self._processes.connect()

    # Lightning's `setup` calls the next two, in this order.

    def model_to_device(self) -> None:
        super().model_to_device()
        self._host.attach(self.user_module.trainer, self._checkpoints.take_resumed())

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self._host.check_training(self.optimizers)

    def process_dataloader(self, dataloader: object) -> object:
        check_loader(dataloader)
        return self._replicas.process_dataloader(dataloader)

    # Training.

    def on_train_start(self) -> None:
        self._processes.signals.attach(self.user_module.trainer)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        self._host.engine.set_step(batch=batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._host.begin_batch()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.training_step(partial(super().training_step, **kwargs), args)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the user's backward; gradients are averaged before `on_after_backward` is called."""
        module, plugin = self.user_module, self.precision_plugin
        self.pre_backward(closure_loss)
        loss = plugin.pre_backward(closure_loss, module)
        run = partial(plugin.backward, loss, module, optimizer, *args, **kwargs)
        self._host.backward(closure_loss, run)
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def on_train_end(self) -> None:
        self._host.stop_early(is_end=True)

    def block_backward_sync(self) -> Any:
        """Accumulate gradients in each replica within the block, as under DDP's `no_sync`."""
        return replace_attributes(self._host.engine.model, {"is_accumulating": True})

    # Validation, test, prediction.

    def on_validation_start(self) -> None:
        if self._host.engine.options.is_fitting and not self.user_module.trainer.sanity_checking:
            self._host.stop_early(is_end=False)
        self._replicas.share_buffers()
        self._host.engine.state.abandon()
        self._host.engine.set_step(is_validating=True)
        self._processes.signals.attach(self.user_module.trainer)

    def on_test_start(self) -> None:
        self._processes.signals.attach(self.user_module.trainer)

    def on_predict_start(self) -> None:
        self._host.engine.set_step(is_uneven=self._replicas.are_several)
        self._processes.signals.attach(self.user_module.trainer)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.evaluation_step(partial(super().validation_step, **kwargs), args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._host.evaluation_step(partial(super().test_step, **kwargs), args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._host.evaluation_step(partial(super().predict_step, **kwargs), args)
        stored = stored_graph(self._host.engine.step.batch)
        return outputs if stored is None else stored.in_users_order(outputs)

    def on_validation_end(self) -> None:
        self._host.end_validation()
        self._host.engine.set_step(is_validating=False)
        self._host.engine.statistics.warn()

    # Collectives.

    def barrier(self, name: str | None = None) -> None:
        self._processes.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._processes.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._processes.vote(decision, needs_all=all)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        reduce = partial(_compat.reduce_over, reduce_op=reduce_op)
        return self._replicas.over(tensor, group, reduce)

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        gather = partial(super().all_gather, sync_grads=sync_grads)
        return self._replicas.over(tensor, group, gather)

    # Checkpoints.

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any | None = None
    ) -> None:
        write = partial(super().save_checkpoint, checkpoint, storage_options=storage_options)
        self._checkpoints.save(checkpoint, filepath, write)

    def load_checkpoint(
        self, checkpoint_path: PathLike, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self._checkpoints.load(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        self._checkpoints.begin_load_of_weights()
        with self._gathered():
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._host.staged is not None:
            self._host.staged.drop_states()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._gathered():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state, staged = super().optimizer_state(optimizer), self._host.staged
        return state if staged is None else staged.whole_state(optimizer, state)

    def remove_checkpoint(self, filepath: PathLike) -> None:
        super().remove_checkpoint(filepath)
        self._checkpoints.remove(filepath)

    # The end.

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, or save if all stop together; say where the run goes on."""
        if isinstance(exception, SIGTERMException) and self._processes.signals.stops_together:
            self._processes.signals.save()
        if isinstance(exception, SIGTERMException | KeyboardInterrupt):
            self._checkpoints.tell_newest()
        self._processes.fail(exception)

    def teardown(self) -> None:
        with ExitStack() as after:  # each of these runs, also if another one raises
            after.callback(self._processes.end_run)
            after.callback(super().teardown)
            after.callback(self._checkpoints.take_resumed)  # of a run that failed before it began
            self._host.detach()

"""Checkpoints: Lightning's own, whole on every rank, with what the run needs to go on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe.comm import Mesh
from lightning_gnnpipe.engine import PipelineEngine, RankHistories, RunState, SavedRun
from lightning_gnnpipe.errors import CheckpointError, ConfigError, explain
from lightning_gnnpipe.fallbacks import Fallbacks
from lightning_gnnpipe.saving import sharded, sidecar
from lightning_gnnpipe.steps import PipelinedModel, merge_optimizer_states, own_optimizer_state
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer._compat import PathLike
from lightning_gnnpipe.trainer.checkpoint_io import (
    TRUST,
    AtomicCheckpointIO,
    holds_plain_types,
    local_path,
)
from lightning_gnnpipe.trainer.launcher import random_state
from lightning_gnnpipe.trainer.processes import PipeProcesses
from lightning_gnnpipe.trainer.signals import StopSignals, keep_last

log = logging.getLogger(__name__)

_KEY = "gnnpipe"


class PipeCheckpoints(PipeProcesses):
    """Puts the stages' weights and optimizer states together, and takes whole ones apart.

    Args:
        args: Of `PipeProcesses`, as are `kwargs`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine: PipelineEngine | None = None
        self._prefix = ""
        self._signals = StopSignals()
        self._saved: tuple[SavedRun, Mapping[str, Any]] | None = None  # and random numbers
        self._ended: RunState | None = None  # of the last run that trained
        self._fallbacks = Fallbacks(log)

    @property
    def engine(self) -> PipelineEngine:
        """The engine, while a fit, validate, test or predict runs.

        Raises:
            ConfigError: Outside of a run.
        """
        if self._engine is None:
            raise ConfigError(
                explain(
                    expected="the engine to be asked for while the Trainer runs",
                    found="no run in progress",
                    remedy="Ask in a hook such as on_train_epoch_end.",
                )
            )
        return self._engine

    def make_checkpoint_io(self) -> CheckpointIO:
        return AtomicCheckpointIO()

    def load_checkpoint(
        self, checkpoint_path: PathLike, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint; all ranks fail together, with the first one's reason.

        Raises:
            CheckpointError: If it cannot be read.
        """
        checkpoint_path = self.broadcast(
            checkpoint_path
        )  # each rank may have found another last one
        path = local_path(checkpoint_path)

        def read() -> dict[str, Any]:
            if path is not None and sharded.is_sharded(path):
                found = sharded.read_sharded(path, holds_plain_types(weights_only))
            else:
                found = self._read_stock(checkpoint_path, weights_only)
            self._saved = self._read_run(found, path)
            return found

        found = self.together(read)
        has_histories = self._saved is not None and bool(self._saved[0].stages)
        has_histories = self.reduce_boolean_decision(has_histories)  # all take the same steps
        if self._saved is not None:
            run, random = self._saved
            run = run if has_histories else SavedRun(run.state, ())
            self._saved = run, random
        return found

    def teardown(self) -> None:
        self._saved = None  # of a run that failed before it began
        super().teardown()

    def _read_stock(self, path: PathLike, weights_only: bool | None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        try:
            found = _compat.read_checkpoint(self.checkpoint_io, path, weights_only)
        except FileNotFoundError:
            raise
        except Exception as error:  # torch does not say what damaged files raise
            raise CheckpointError(
                explain(
                    expected=f"a checkpoint in {path}",
                    found=f"{type(error).__name__}: {error}",
                    remedy="Load an earlier one; if it holds objects of your own classes, and you "
                    "trust it, pass weights_only=False (before Lightning 2.6: set the environment "
                    f"variable {TRUST}=1).",
                )
            ) from error
        if not isinstance(found, dict) or "state_dict" not in found:
            raise CheckpointError(
                explain(
                    expected=f"a checkpoint of Lightning in {path}",
                    found=f"a {type(found).__name__} without 'state_dict'",
                    remedy="Load bare weights with module.load_state_dict(...) before training.",
                )
            )
        return found

    def _read_run(
        self, checkpoint: Mapping[str, Any], path: Path | None
    ) -> tuple[SavedRun, Mapping[str, Any]] | None:
        """Return what the checkpoint tells of a pipelined run, where one is to go on."""
        assert self.lightning_module is not None
        found = checkpoint.get(_KEY)
        is_new_run = self._engine is None and self.lightning_module.trainer.state.fn == (
            TrainerFn.FITTING
        )
        if found is None or not is_new_run:
            return None
        if not isinstance(found, dict) or not {"run", "random", "histories"} <= found.keys():
            found = {"run": {}}
        state = RunState.of(found["run"])
        ident = found["histories"]
        stages: tuple[RankHistories, ...] = ()
        is_sharded = path is not None and sharded.is_sharded(path)
        if ident is not None and not (
            ident == sharded.HISTORIES if is_sharded else sidecar.is_id(ident)
        ):
            raise CheckpointError(
                explain(
                    expected=f"the id of histories in {path}",
                    found=repr(ident),
                    remedy="Load an earlier checkpoint: this one was changed after it was saved.",
                )
            )
        if path is not None and ident is not None:
            folder = path / ident if is_sharded else sidecar.histories_folder(path, ident)
            stages = sidecar.read_stages(folder, state.num_ranks)
        return SavedRun(state, stages), found["random"]

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self._engine is not None:  # in the middle of a run, as after a search for a rate
            self._engine.model.restore()
            self._engine.graphs.drop_histories()
            self._engine.statistics.stale.clear()
        super().load_model_state_dict(checkpoint, strict)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        if not self._is_split:
            return module.state_dict()
        with self.engine.model.reads.inside():
            if self._is_interrupted:
                return module.state_dict()
            if self.options.save_distributed_checkpoint:
                return own_state_dict(module, self.engine.model, self._pipe.mesh)
            return full_state_dict(module, self.engine.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        reads = self._engine.model.reads if self._engine else None
        if reads is not None:
            reads.forget_foreign_states()
        with reads.inside() if reads is not None else nullcontext():
            state = super().optimizer_state(optimizer)
        if not self._has_peers or self._is_interrupted:
            return state
        if self.options.save_distributed_checkpoint:
            own = own_optimizer_state(self._pipe, state)
            return {**state, "state": {} if self._pipe.mesh.replica else own}
        return merge_optimizer_states(self._pipe, state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Any | None = None
    ) -> None:
        if self._is_interrupted and (self._is_split or self._has_workers):
            log.warning("No checkpoint was written to %s: other stages may have failed.", filepath)
            keep_last(_compat.trainer_of(self.lightning_module))
            return
        filepath = self.broadcast(filepath)
        path = local_path(filepath)
        if self.options.save_distributed_checkpoint:
            self._save_sharded(checkpoint, filepath, path)
            return
        ident = None
        state = self._run_state()
        if state is not None and "optimizer_states" in checkpoint:
            has_histories = path is not None and bool(state.inputs)
            ident = self._everyone.broadcast_object(sidecar.new_id() if has_histories else None)
            if path is None and bool(state.inputs) and self.is_global_zero:
                self._fallbacks.tell(
                    f"{filepath} is on remote storage, where histories are not saved",
                    origin="resuming with the histories of the run",
                    to="resuming with an exact step, which fills them",
                )
            checkpoint[_KEY] = self._run(state, ident)
        if path is not None and ident is not None:
            self._write_histories(sidecar.unfinished_folder(path, ident))

        def write() -> None:
            if path is not None and ident is not None:
                sidecar.finish(path, ident)
            super(PipeCheckpoints, self).save_checkpoint(checkpoint, filepath, storage_options)

        self.together(lambda: write() if self.is_global_zero else None)
        if path is not None and ident is not None:
            with suppress(OSError):  # the first rank's file system is this rank's as well
                sidecar.finish(path, ident)
        if path is not None and self.local_rank == 0:
            is_late = isinstance(self.checkpoint_io, AsyncCheckpointIO)
            sidecar.prune(path, ident, keeps_last=is_late)

    def _save_sharded(
        self, checkpoint: dict[str, Any], filepath: PathLike, path: Path | None
    ) -> None:
        if path is None:
            raise ConfigError(
                explain(
                    expected="a local path for a sharded checkpoint",
                    found=str(filepath),
                    remedy="Save to a file system that all ranks see, or leave "
                    "save_distributed_checkpoint off.",
                )
            )
        weights = checkpoint.pop("state_dict")
        if not self._is_split and not self.is_global_zero:
            weights = {}
        optimizers = [one["state"] for one in checkpoint.get("optimizer_states", ())]
        for one in checkpoint.get("optimizer_states", ()):
            one["state"] = {}
        self.together(lambda: sharded.part_of(path).mkdir(parents=True, exist_ok=True))
        state = self._run_state()
        if state is not None and optimizers:
            has_histories = bool(state.inputs)
            checkpoint[_KEY] = self._run(state, sharded.HISTORIES if has_histories else None)
            if has_histories:
                self._write_histories(sharded.part_of(path) / sharded.HISTORIES)
        meta = sharded.write_shards(self._pipe, path, checkpoint, weights, optimizers)
        self.together(lambda: sharded.finish(path, meta) if self.is_global_zero else None)

    def on_exception(self, exception: BaseException) -> None:
        """Save, if all ranks stop together; then see `PipeProcesses.on_exception`."""
        if isinstance(exception, SIGTERMException) and self._signals.stops_together:
            self._signals.save()
        super().on_exception(exception)

    def remove_checkpoint(self, filepath: PathLike) -> None:
        super().remove_checkpoint(filepath)
        path = local_path(filepath)
        if self.local_rank == 0 and path is not None:
            sidecar.prune(path, None)

    def _run_state(self) -> RunState | None:
        """Return the state of the run that trains, or that of the last one, without histories."""
        if self._engine is not None and self._engine.options.is_fitting:
            return self._engine.run_state()
        return self._ended

    def _run(self, state: RunState, histories: str | None) -> dict[str, Any]:
        """Return what a checkpoint keeps of the run, in plain types."""
        return {
            "run": state.as_dict(),
            "random": random_state(self.root_device),
            "histories": histories,
        }

    def _write_histories(self, folder: Path) -> None:
        def write() -> None:
            for stage, saved in self.engine.stage_states().items():
                sidecar.write_stage(folder, stage, saved)

        self.together(write)

    @property
    def _is_split(self) -> bool:
        """Whether this rank holds only its stage's parameters."""
        return self._has_peers and self._engine is not None and self._engine.model.is_split

    @property
    def _is_stopping(self) -> bool:
        return bool(self._engine is not None and self._engine.progress.signals)

    @property
    def _is_interrupted(self) -> bool:
        """Whether other ranks may be gone: an error ended the run, not a signal that all obey."""
        trainer = _compat.trainer_of(self.lightning_module)
        if trainer is None:  # not begun, or in the process that started those that train
            return self._has_workers and sys.exc_info()[1] is not None
        is_stop = isinstance(sys.exc_info()[1], SIGTERMException)
        is_orderly = is_stop and self._signals.stops_together
        return bool(trainer.interrupted) and not is_orderly


State = dict[str, Any]


def full_state_dict(root: nn.Module, model: PipelinedModel) -> dict[str, Tensor]:
    """Return the state dict of `root` with the weights of all stages, on every rank; collective.

    Args:
        root: The LightningModule.
        model: The pipelined model.
    """
    state: dict[str, Tensor] = root.state_dict()
    model.complete(state, root)
    return state


def own_state_dict(root: nn.Module, model: PipelinedModel, mesh: Mesh) -> State:
    """Return the part of the state dict of `root` that this rank writes; no two write the same.

    What belongs to no stage is the first one's; a stage's first rank writes, of the first
    replica. For the other arguments see `full_state_dict`.
    """
    if mesh.shard or mesh.replica:
        return {}
    named = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    owned, pipelined = model.owned, model.pipelined
    foreign = {id(named[name]) for name in pipelined - owned if name in named}
    own = {id(named[name]) for name in owned if name in named}
    state: State = root.state_dict(keep_vars=True)
    return {
        key: value.detach() if isinstance(value, Tensor) else value
        for key, value in state.items()
        if id(value) in own or (mesh.is_first and id(value) not in foreign)
    }

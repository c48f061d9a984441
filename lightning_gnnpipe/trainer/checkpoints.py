"""Checkpoints: stock files with the weights, and the state of the run beside them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gnnpipe.engine import RankHistories, RunState, SavedRun
from lightning_gnnpipe.errors import CheckpointError, Fallbacks
from lightning_gnnpipe.saving import sidecar
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer._compat import PathLike
from lightning_gnnpipe.trainer.engine_host import EngineHost, ResumedRun
from lightning_gnnpipe.trainer.processes import Processes
from lightning_gnnpipe.trainer.random_state import random_state

log = logging.getLogger(__name__)

_KEY = "gnnpipe"
# torch's environment variable by which a user trusts all files.
_TRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class Checkpoints:
    """Saves the state of the run and its histories with a checkpoint, and reads them."""

    def __init__(
        self, strategy: _compat.LightningStrategy, processes: Processes, host: EngineHost
    ) -> None:
        self._strategy, self._processes, self._host = strategy, processes, host
        self._resumed: ResumedRun | None = None
        self._fallbacks = Fallbacks(log)

    def take_resumed(self) -> ResumedRun | None:
        """Return the run that the last loaded checkpoint goes on with, once."""
        resumed, self._resumed = self._resumed, None
        return resumed

    def load(self, checkpoint_path: PathLike, weights_only: bool | None) -> dict[str, Any]:
        """Return the checkpoint; all ranks fail together, with the first one's reason."""
        # Each rank may have found another "last" checkpoint.
        checkpoint_path = self._processes.broadcast(checkpoint_path)
        path = _local_path(checkpoint_path)

        def read() -> dict[str, Any]:
            found = self._read_stock(checkpoint_path, weights_only)
            self._resumed = self._read_run(found, path)
            return found

        found = self._processes.together(read)
        has_histories = self._resumed is not None and bool(self._resumed[0].stages)
        # All ranks have them or none uses them, so that all run the same steps.
        has_histories = self._processes.vote(has_histories, needs_all=True)
        if self._resumed is not None and not has_histories:
            run, random = self._resumed
            self._resumed = SavedRun(run.state, ()), random
        return found

    def _read_stock(self, path: PathLike, weights_only: bool | None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        try:
            found = _compat.read_checkpoint(self._strategy.checkpoint_io, path, weights_only)
        except FileNotFoundError:
            raise
        except Exception as error:  # torch does not say what damaged files raise
            raise CheckpointError(
                expected=f"a checkpoint in {path}",
                found=f"{type(error).__name__}: {error}",
                remedy="Load an earlier checkpoint. If this one holds objects of your own "
                "classes and you trust it, pass weights_only=False (before Lightning 2.6, set "
                f"the environment variable {_TRUST}=1).",
            ) from error
        if not isinstance(found, dict) or "state_dict" not in found:
            raise CheckpointError(
                expected=f"a checkpoint of Lightning in {path}",
                found=f"a {type(found).__name__} without 'state_dict'",
                remedy="Load bare weights with module.load_state_dict(...) before training.",
            )
        return found

    def _read_run(self, checkpoint: Mapping[str, Any], path: Path | None) -> ResumedRun | None:
        """Return the pipelined run in the checkpoint, if a fit is about to go on with it."""
        found, fn = checkpoint.get(_KEY), self._strategy.user_module.trainer.state.fn
        is_new_run = not self._host.is_running and fn == TrainerFn.FITTING
        if found is None or not is_new_run:
            return None
        if not isinstance(found, dict) or not {"run", "random", "histories"} <= found.keys():
            found = {"run": {}}
        state = RunState.of(found["run"])
        ident = found["histories"]
        stages: tuple[RankHistories, ...] = ()
        if ident is not None and not sidecar.is_id(ident):
            raise CheckpointError(
                expected=f"the id of histories in {path}",
                found=repr(ident),
                remedy="Load an earlier checkpoint: this one was changed after it was saved.",
            )
        if path is not None and ident is not None:
            folder = sidecar.histories_folder(path, ident)
            stages = sidecar.read_stages(folder, state.num_ranks)
        return SavedRun(state, stages), found["random"]

    def begin_load_of_weights(self) -> None:
        """Forget what was computed with the present weights, as after a search for a rate."""
        if self._host.is_running:
            engine = self._host.engine
            engine.graphs.inputs.drop_rows()
            engine.statistics.stale.clear()

    def save(
        self, checkpoint: dict[str, Any], filepath: PathLike, write: Callable[[PathLike], None]
    ) -> None:
        """Write the checkpoint by `write` on rank 0, and the histories beside it on all ranks."""
        processes, is_first = self._processes, self._strategy.is_global_zero
        if processes.is_interrupted and self._host.is_staged:
            log.error("No checkpoint saved: the weights of other stages are gone.")
            return
        if processes.is_interrupted:  # without other ranks, and so without histories
            state = self._run_state()
            if state is not None and "optimizer_states" in checkpoint:
                checkpoint[_KEY] = self._run(state.without_histories(), None)
            if is_first and not processes.has_workers:  # a process that only started ranks
                write(filepath)
            return
        filepath = processes.broadcast(filepath)
        path = _local_path(filepath)
        ident = None
        state = self._run_state()
        if state is not None and "optimizer_states" in checkpoint:
            has_histories = path is not None and bool(state.inputs)
            ident = processes.everyone.broadcast_object(sidecar.new_id() if has_histories else None)
            if path is None and bool(state.inputs) and is_first:
                self._fallbacks.tell(
                    "A run resumed from %s begins with an exact step, since histories are not "
                    "saved on remote storage.",
                    filepath,
                )
            checkpoint[_KEY] = self._run(state, ident)
        if path is not None and ident is not None:
            self._write_histories(sidecar.unfinished_folder(path, ident))

        def finish() -> None:
            if path is not None and ident is not None:
                sidecar.finish(path, ident)
            write(filepath)

        processes.together(lambda: finish() if is_first else None)
        if path is not None and ident is not None:
            with suppress(OSError):  # on a common file system rank 0 has done it already
                sidecar.finish(path, ident)
        if path is not None and self._strategy.local_rank == 0:
            is_late = isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO)
            sidecar.prune(path, ident, keeps_last=is_late)

    def remove(self, filepath: PathLike) -> None:
        """Delete the histories of checkpoints that are gone from the folder of `filepath`."""
        path = _local_path(filepath)
        if self._strategy.local_rank == 0 and path is not None:
            sidecar.prune(path, None)

    def _run_state(self) -> RunState | None:
        """Return the state of the run that trains, or of the last one, without histories."""
        host = self._host
        if not host.is_running or not host.engine.options.is_fitting:
            return host.last_run
        return host.engine.run_state()

    def _run(self, state: RunState, histories: str | None) -> dict[str, Any]:
        """Return the run for the checkpoint, in plain types."""
        return {
            "run": state.as_dict(),
            "random": random_state(self._strategy.root_device),
            "histories": histories,
        }

    def _write_histories(self, folder: Path) -> None:
        def write() -> None:
            for stage, saved in self._host.engine.stage_states().items():
                sidecar.write_stage(folder, stage, saved)

        self._processes.together(write)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a local checkpoint to a temporary file, and moves it to its name.

    An interrupted save leaves the last checkpoint intact. Remote paths are written by Lightning.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None
    ) -> None:
        target = _local_path(path)
        if target is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        sidecar.write_synced(part, checkpoint)
        os.replace(part, target)

    def load_checkpoint(
        self, path: PathLike, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint; with `weights_only` refuse all but tensors and plain types.

        torch before 2.6, and Lightning before 2.6, would run any code in the file.
        """
        if not get_filesystem(path).exists(str(path)):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        is_plain = _holds_plain_types(weights_only)
        return _compat.load_file(path, map_location, is_plain)


def _holds_plain_types(weights_only: bool | None) -> bool:
    """Whether to load only tensors and plain types; None reads the environment."""
    if weights_only is not None:
        return weights_only
    return os.environ.get(_TRUST, "0").lower() not in ("1", "y", "yes", "true")


def _local_path(path: PathLike) -> Path | None:
    """Return `path` as a local path; None if it is remote."""
    text = str(path)
    if "://" not in text:
        return Path(text)
    return Path(text.removeprefix("file://")) if text.startswith("file://") else None

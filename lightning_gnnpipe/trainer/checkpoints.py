"""Checkpoints: stock files with the weights, and histories beside them.

Histories lie in files `.gnnpipe/<id>/stage_<rank>.pt`, written first. Their folder gets the name
<id>, which the checkpoint contains, when all ranks have written. So an interrupted save always
leaves a complete checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnnpipe.engine import RankHistories, RunState, SavedRun
from lightning_gnnpipe.errors import CheckpointError, Fallbacks
from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer._compat import PathLike
from lightning_gnnpipe.trainer.engine_host import EngineHost, ResumedRun
from lightning_gnnpipe.trainer.processes import Processes, random_state

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
        self._newest: tuple[int, str] | None = None  # step and path that a fit may go on from
        self._fallbacks = Fallbacks(log)

    def begin_run(self) -> None:
        """Forget the checkpoints of the last run."""
        self._newest = None

    def tell_newest(self) -> None:
        """Say from which checkpoint a fit that is stopped goes on."""
        if self._newest is not None:
            (step, path), trainer = self._newest, self._strategy.user_module.trainer
            rank_zero_info(
                f"Stopped after step {trainer.global_step}. "
                f'trainer.fit(ckpt_path="{path}") goes on from step {step}.'
            )

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

        found = self._processes.everyone.together(read)
        has_histories = self._resumed is not None and bool(self._resumed[0].stages)
        # All ranks have them or none uses them, so that all run the same steps.
        has_histories = self._processes.vote(has_histories, needs_all=True)
        if self._resumed is not None and not has_histories:
            run, random = self._resumed
            self._resumed = SavedRun(run.state, ()), random
        return found

    def _read_stock(self, path: PathLike, weights_only: bool | None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        with reading(
            f"a checkpoint in {path}",
            "Load an earlier checkpoint. If this one holds objects of your own classes and you "
            "trust it, pass weights_only=False (before Lightning 2.6, set the environment "
            f"variable {_TRUST}=1).",
        ):
            found = _compat.read_checkpoint(self._strategy.checkpoint_io, path, weights_only)
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
        is_id = isinstance(ident, str) and re.fullmatch(r"[0-9a-f]{16}", ident)
        if ident is not None and not is_id:  # it becomes part of a path
            raise CheckpointError(
                expected=f"the id of histories in {path}",
                found=repr(ident),
                remedy="Load an earlier checkpoint: this one was changed after it was saved.",
            )
        if path is not None and ident is not None:
            stages = read_histories(histories_folder(path, ident), state.num_ranks)
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
        state = self._run_state() if "optimizer_states" in checkpoint else None
        if processes.is_interrupted:  # without other ranks, and so without histories
            if state is not None:
                checkpoint[_KEY] = self._run(state.without_histories(), None)
            if is_first and not processes.has_workers:  # a process that only started ranks
                write(filepath)
                self._note(checkpoint, filepath)
            return
        if not processes.are_set_up:  # ranks were forks, whose optimizers are gone
            checkpoint.pop("optimizer_states", None)
            if is_first:
                write(filepath)
            return
        filepath = processes.broadcast(filepath)
        path, ident = _local_path(filepath), None
        if state is not None:
            has_histories = path is not None and bool(state.inputs)
            new = uuid.uuid4().hex[:16] if has_histories else None
            ident = processes.everyone.broadcast_object(new)
            if path is None and bool(state.inputs) and is_first:
                self._fallbacks.tell(
                    "A run resumed from %s begins with an exact step, since histories are not "
                    "saved on remote storage.",
                    filepath,
                )
            checkpoint[_KEY] = self._run(state, ident)
        if path is not None and ident is not None:
            folder, host = unfinished_folder(path, ident), self._host

            def write_all() -> None:
                for stage, saved in host.engine.stage_states().items():
                    write_histories(folder, stage, saved)

            processes.everyone.together(write_all)

        def finish() -> None:
            if path is not None and ident is not None:
                finish_histories(path, ident)
            write(filepath)
            self._note(checkpoint, filepath)

        processes.everyone.together(lambda: finish() if is_first else None)
        if path is not None and ident is not None:
            with suppress(OSError):  # on a common file system rank 0 has done it already
                finish_histories(path, ident)
        if path is not None and self._strategy.local_rank == 0:
            is_late = isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO)
            prune_histories(path, ident, keeps_last=is_late)

    def remove(self, filepath: PathLike) -> None:
        """Delete the histories of checkpoints that are gone from the folder of `filepath`."""
        path = _local_path(filepath)
        if self._newest is not None and self._newest[1] == str(filepath):
            self._newest = None
        if self._strategy.local_rank == 0 and path is not None:
            prune_histories(path, None)

    def _note(self, checkpoint: Mapping[str, Any], path: PathLike) -> None:
        """Record a checkpoint of a fit, with optimizer states."""
        is_fit = self._strategy.user_module.trainer.state.fn == TrainerFn.FITTING
        if is_fit and "optimizer_states" in checkpoint:
            self._newest = checkpoint["global_step"], str(path)

    def _run_state(self) -> RunState | None:
        """Return the state of the run that trains, or of the last one, without histories."""
        host = self._host
        if not host.is_running or not host.engine.options.is_fitting:
            return host.last_run
        return host.engine.run_state()

    def _random_state(self) -> Mapping[str, Any]:
        """Return the random states of the run that trains, or those at the end of the last one."""
        host = self._host
        is_fitting = host.is_running and host.engine.options.is_fitting
        return (not is_fitting and host.last_random) or random_state(self._strategy.root_device)

    def _run(self, state: RunState, histories: str | None) -> dict[str, Any]:
        """Return the run for the checkpoint, in plain types."""
        return {
            "run": asdict(state),
            "random": self._random_state(),
            "histories": histories,
        }


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
        try:
            write_synced(part, checkpoint)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        os.replace(part, target)

    def load_checkpoint(
        self, path: PathLike, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint; with `weights_only` refuse all but tensors and plain types.

        torch before 2.6, and Lightning before 2.6, would run any code in the file.
        """
        if not get_filesystem(path).exists(str(path)):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        if weights_only is None:
            weights_only = os.environ.get(_TRUST, "0").lower() not in ("1", "y", "yes", "true")
        return _compat.load_file(path, map_location, weights_only)


def _local_path(path: PathLike) -> Path | None:
    """Return `path` as a local path; None if it is remote."""
    text = str(path)
    if "://" not in text:
        return Path(os.path.expanduser(text))  # "~best.ckpt" is a name
    return Path(text.removeprefix("file://")) if text.startswith("file://") else None


_FOLDER = ".gnnpipe"
_OWNER = "checkpoint"  # a file with the name of the checkpoint they belong to
_PART = ".part"
_ABANDONED_S = 3600.0


def histories_folder(checkpoint: Path, ident: str) -> Path:
    """Return the folder of a checkpoint's histories; links are resolved."""
    return checkpoint.resolve().parent / _FOLDER / ident


def unfinished_folder(checkpoint: Path, ident: str) -> Path:
    """Return the folder to which ranks write, before `finish_histories` renames it."""
    return checkpoint.parent / _FOLDER / (ident + _PART)


def write_histories(folder: Path, stage: int, saved: Mapping[Any, Any]) -> None:
    """Write and sync the histories of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    write_synced(folder / f"stage_{stage}.pt", dict(saved))


def write_synced(path: Path, content: dict[Any, Any]) -> None:
    """Save `content` to a file, and wait until it is on disk."""
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch cannot close an archive that Ctrl+C has cut
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def finish_histories(checkpoint: Path, ident: str) -> None:
    """Rename the folder to its id, when all ranks on this file system have written."""
    folder = unfinished_folder(checkpoint, ident)
    (folder / _OWNER).write_text(checkpoint.name)
    folder.rename(folder.with_name(ident))


def prune_histories(checkpoint: Path, keep: str | None, *, keeps_last: bool = False) -> None:
    """Delete histories of earlier checkpoints with this name, and abandoned partial folders.

    `keep`: an id. `keeps_last`: the previous ones too, as an asynchronous save may be under way.
    """
    folder = checkpoint.parent / _FOLDER
    newest_first = sorted(folder.glob("*"), key=_age) if folder.is_dir() else []
    for one in newest_first:
        if one.name == keep:
            continue
        is_old = _owner(one) == checkpoint.name
        if keeps_last and is_old:
            keeps_last = False
            continue
        is_left = one.name.endswith(_PART) and time.time() + _age(one) > _ABANDONED_S
        if is_old or is_left:  # another run may be writing to the same folder
            shutil.rmtree(one, ignore_errors=True)
    with suppress(OSError):  # not empty, or missing
        folder.rmdir()


def _age(path: Path) -> float:
    """Return the negative modification time, which is larger for older paths."""
    try:
        return -path.stat().st_mtime
    except OSError:  # another run has deleted it
        return -time.time()


def _owner(folder: Path) -> str:
    """Return the checkpoint name in a histories folder; empty if there is none."""
    try:
        return (folder / _OWNER).read_text()
    except OSError:  # not finished, or another run has deleted it
        return ""


def read_histories(folder: Path, num_stages: int) -> tuple[dict[Any, Any], ...]:
    """Return each rank's histories, memory-mapped; empty unless all files are there.

    Without a shared file system, a host has the files of its own ranks only.
    """
    paths = [folder / f"stage_{stage}.pt" for stage in range(num_stages)]
    if not all(path.is_file() for path in paths):
        return ()
    stages = []
    remedy = f"Delete {folder} to resume without histories: the first step is then exact."
    for stage, path in enumerate(paths):
        with reading(f"the histories of stage {stage} of {num_stages} in {path}", remedy):
            stages.append(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    return tuple(stages)


@contextmanager
def reading(expected: str, remedy: str) -> Iterator[None]:
    """Raise a `CheckpointError` for any error: torch does not say what damaged files raise."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise CheckpointError(expected=expected, found=found, remedy=remedy) from error

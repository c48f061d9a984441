"""Checkpoints: whole or not there; a damaged one ends all ranks with a reason."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer import call

from lightning_gnnpipe.errors import CheckpointError
from lightning_gnnpipe.trainer import checkpoints
from lightning_gnnpipe.trainer.checkpoints import AtomicCheckpointIO
from tests.helpers.cases import covering, slow
from tests.helpers.observed import make_data, make_module
from tests.helpers.record import StatsRecorder
from tests.helpers.trainers import quiet_trainer, weights

Logs = pytest.LogCaptureFixture
Patches = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patches) -> Iterator[Path]:
    """All paths are in a folder of the test's own, where nothing that is loaded may do anything."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not Path("exploded").exists()


def make_trainer(
    *callbacks: L.Callback,
    num_stages: int = 2,
    num_shards: int = 1,
    epochs: int = 3,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> L.Trainer:
    return quiet_trainer(
        num_stages * num_shards,
        {"num_chunks": 4, "graph_parallel": num_shards, **options},
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        **(trainer_options or {}),
    )


def fit(
    name: str, *callbacks: L.Callback, resume: Path | None = None, **options: Any
) -> tuple[torch.Tensor, Path]:
    """Train; return the weights and the last checkpoint in the folder `name`."""
    folder = Path(name).resolve()
    trained, saver = make_module(0.2), ModelCheckpoint(folder, filename="{epoch}", save_last=True)
    trainer = make_trainer(saver, *callbacks, **options)
    trainer.fit(trained, datamodule=make_data(), ckpt_path=resume)
    return weights(trained), folder / "last.ckpt"


def kinds_after(path: Path, **options: Any) -> list[bool]:
    """Go on from a checkpoint on one stage; return which steps were exact."""
    kinds = StatsRecorder()
    fit("again", kinds, **{"num_stages": 1, "epochs": 4, "resume": path, **options})
    return kinds.was_exact


@pytest.fixture(scope="module")
def once_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(str(tmp_path_factory.mktemp("once") / "saved"))[1]


@pytest.fixture
def saved(once_saved: Path, folder: Path) -> Path:
    """A checkpoint of the test's own, of two stages after three epochs, next to its histories."""
    shutil.copytree(once_saved.parent, folder / "saved", symlinks=True)
    return folder / "saved" / once_saved.name


def test_histories_of_checkpoints_that_are_gone_are_gone(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="train_loss", save_top_k=2)
    fit("", saver, epochs=6)
    files = list(tmp_path.glob("*.ckpt"))
    used = {torch.load(path, weights_only=True)["gnnpipe"]["histories"] for path in files}
    assert {path.name for path in (tmp_path / ".gnnpipe").iterdir()} == used
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("to_host", [True, False])
def test_a_checkpoint_goes_on_on_another_device(to_host: bool, tmp_path: Path) -> None:
    """From the CPU to the device of `scripts/check_gpu.sh`, and back; else both are the CPU."""

    def run(folder: Path, place: Any, epochs: int, resume: Path | None = None) -> Any:
        saver, options = ModelCheckpoint(folder, save_last=True), {"accelerator": place}
        options["precision"] = "64-true"
        trainer = make_trainer(saver, num_stages=1, epochs=epochs, trainer_options=options)
        net, source = make_module(), make_data()
        net.net.dropout.p = 0.0  # a GPU draws other numbers than a CPU
        source.data.x = source.data.x.double()
        trainer.fit(net, datamodule=source, ckpt_path=resume)
        return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]

    places = ("cpu", CPUAccelerator())  # the script moves what asks for "cpu"
    first, then = places if to_host else places[::-1]
    expected = run(tmp_path / "whole", CPUAccelerator(), 6)
    run(tmp_path / "half", first, 3)
    found = run(tmp_path / "rest", then, 6, tmp_path / "half" / "last.ckpt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)  # Adam adds to rounding


def test_without_its_histories_a_checkpoint_goes_on_exactly(saved: Path, caplog: Logs) -> None:
    moved = saved.parents[1] / "moved.ckpt"
    shutil.copy(saved, moved)
    assert kinds_after(moved, epochs=5) == [True, False]
    assert "no histories of this input: they are not beside it. Copy the folder" in caplog.text


def test_a_link_to_a_checkpoint_finds_its_histories(saved: Path) -> None:
    link = saved.parents[1] / "link.ckpt"
    link.symlink_to(saved)
    assert kinds_after(link) == [False]


class Pickled:
    """Calls what it is made of where it is loaded."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


EXPLODES = Pickled(Path.touch, (Path("exploded"),))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the state of the pipeline in a checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint["gnnpipe"])
    torch.save(checkpoint, path)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "code": lambda path: path.write_bytes(pickle.dumps(EXPLODES)),
    "foreign": lambda path: torch.save({"weights": torch.ones(3)}, path),
    "format": lambda path: rewrite(path, lambda state: state["run"].update(version=0)),
    "id": lambda path: rewrite(path, lambda state: state.update(histories="../.gnnpipe/1")),
}
TEXTS = {  # what is said of a checkpoint, if not "a checkpoint in"
    "foreign": "a checkpoint of Lightning in",
    "format": "the state of a pipeline",
    "id": r"the id of histories in .* \(got '\.\./\.gnnpipe/",
}


@pytest.mark.parametrize(("how", "num_stages"), covering(DAMAGE, [1, 2]))
def test_a_damaged_checkpoint_ends_all_ranks(saved: Path, how: str, num_stages: int) -> None:
    DAMAGE[how](saved)
    text, kind = TEXTS.get(how, "a checkpoint in"), Exception if num_stages > 1 else CheckpointError
    with pytest.raises(kind, match=f"Expected {text}"):
        fit("again", num_stages=num_stages, resume=saved)


@pytest.mark.parametrize("how", ["truncated", "code"])
def test_damaged_histories_end_all_ranks_with_a_reason(saved: Path, how: str) -> None:
    ident = torch.load(saved, weights_only=True)["gnnpipe"]["histories"]
    DAMAGE[how](saved.parent / ".gnnpipe" / ident / "stage_1.pt")
    with pytest.raises(Exception, match="Expected the histories of stage 1 of 2"):
        fit("again", resume=saved)


def test_a_save_that_is_cut_off_leaves_the_last_one(tmp_path: Path, monkeypatch: Patches) -> None:
    path = tmp_path / "one.ckpt"
    AtomicCheckpointIO().save_checkpoint({"n": 1}, path)

    def cut_off(value: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"n": 2}, path)
    assert torch.load(path, weights_only=True) == {"n": 1}


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, slow(2)])
def test_a_run_that_saves_before_its_first_step_keeps_histories(
    saved: Path, num_stages: int
) -> None:
    early = saved.parents[1] / "early.ckpt"
    whole, _ = fit("a", num_stages=num_stages, epochs=5, resume=saved)
    saves = LambdaCallback(on_train_start=lambda trainer, _: trainer.save_checkpoint(early))
    fit("b", saves, num_stages=num_stages, epochs=4, resume=saved)
    again, _ = fit("c", num_stages=num_stages, epochs=5, resume=early)
    assert torch.equal(again, whole)


def test_all_ranks_write_where_the_first_one_says(tmp_path: Path) -> None:
    def save(trainer: L.Trainer, _: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(tmp_path / f"of_{trainer.global_rank}" / "one.ckpt")

    saves = LambdaCallback(on_train_epoch_end=save)
    fit("a", saves)
    assert not (tmp_path / "of_1").exists()
    assert kinds_after(tmp_path / "of_0" / "one.ckpt", epochs=3) == [False]


@pytest.mark.parametrize("validates", [False, True])
def test_a_run_saved_when_over_goes_on_exactly(
    validates: bool, tmp_path: Path, caplog: Logs
) -> None:
    path, trained, trainer = tmp_path / "over.ckpt", make_module(), make_trainer(num_stages=1)
    trainer.fit(trained, datamodule=make_data())
    if validates:
        trainer.validate(trained, datamodule=make_data(), verbose=False)
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["gnnpipe"]
    assert state["run"]["num_training_passes"] == 3 and state["histories"] is None
    assert kinds_after(path, epochs=5) == [True, False]
    assert "has no histories of this input: it was saved after fit" in caplog.text


def test_hosts_without_a_common_disk_go_on_exactly(tmp_path: Path, monkeypatch: Patches) -> None:
    """Rank 1 writes to a disk of its own."""
    original, disk = checkpoints._local_path, tmp_path / "disk"

    def on_own_disk(path: Any) -> Path | None:
        found = original(path)
        is_first = found is None or torch.distributed.get_rank() == 0
        return found if is_first else disk / found.name

    monkeypatch.setattr(checkpoints, "_local_path", on_own_disk)
    _, path = fit("saved")
    for folder, stage in ((path.parent, 0), (disk, 1)):
        found = list(folder.glob(".gnnpipe/*"))
        assert found and not [one for one in found if one.suffix == ".part"]
        assert all((one / f"stage_{stage}.pt").is_file() for one in found)

    def expect_exact(trainer: L.Trainer, *_: Any) -> None:
        assert trainer.strategy.collect_stats().is_exact

    fit("again", LambdaCallback(on_train_batch_end=expect_exact), epochs=4, resume=path)


def write(path: Path, *idents: str, is_finished: bool = True) -> None:
    """Write histories of a checkpoint, the later the younger."""
    for age, ident in enumerate(idents):
        checkpoints.write_histories(checkpoints.unfinished_folder(path, ident), 0, {})
        if is_finished:
            checkpoints.finish_histories(path, ident)
            os.utime(checkpoints.histories_folder(path, ident), (age, age))


def test_what_another_run_deletes_ends_no_save(tmp_path: Path, monkeypatch: Patches) -> None:
    path = tmp_path / "one.ckpt"
    write(path, "a", "b")
    write(path, "c", is_finished=False)
    found, glob = sorted((tmp_path / ".gnnpipe").glob("*")), Path.glob

    def deleted(self: Path, pattern: str) -> Any:
        shutil.rmtree(found[0], ignore_errors=True)
        shutil.rmtree(found[2], ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "glob", deleted)
    checkpoints.prune_histories(path, None)
    assert not list(glob(tmp_path, ".gnnpipe"))


def test_what_another_run_is_writing_and_the_last_histories_stay(tmp_path: Path) -> None:
    path, other = tmp_path / "one.ckpt", tmp_path / "other.ckpt"
    write(path, "a", "b", "c")
    write(other, "d", "e", is_finished=False)
    folder, old = (checkpoints.unfinished_folder(other, one) for one in "de")
    os.utime(old, (0, 0))
    checkpoints.prune_histories(path, "c", keeps_last=True)
    assert [one for one in "abc" if checkpoints.histories_folder(path, one).is_dir()] == ["b", "c"]
    assert folder.is_dir() and not old.exists()


@pytest.mark.parametrize("options", [{"save_weights_only": True}, {"save_top_k": -1}])
def test_sigterm_leaves_a_checkpoint_to_go_on_from(options: dict[str, Any], tmp_path: Path) -> None:
    def stop(trainer: L.Trainer, _: Any) -> None:
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    saver = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, **options)
    trainer = make_trainer(saver, LambdaCallback(on_train_epoch_end=stop), num_stages=1, epochs=9)
    with pytest.raises(SystemExit):
        trainer.fit(make_module(), datamodule=make_data())
    assert "optimizer_states" in torch.load(tmp_path / "last-sigterm.ckpt", weights_only=True)


BY_EPOCH = {"monitor": "epoch", "save_top_k": 9, "filename": "{epoch}"}  # the first is the best


@pytest.mark.parametrize(
    ("number", "name", "options"),
    [
        (signal.SIGINT, "every/epoch=1-step=2.ckpt", {"dirpath": "every"}),
        (signal.SIGINT, "last.ckpt", {"dirpath": ".", "save_last": True}),
        (signal.SIGINT, "epoch=1.ckpt", {"dirpath": ".", **BY_EPOCH}),
        (signal.SIGINT, "", {"dirpath": ".", "save_weights_only": True}),
        (signal.SIGINT, "on_exception.ckpt", {"dirpath": ".", "every_n_epochs": 5}),
        (signal.SIGTERM, "last-sigterm.ckpt", {"dirpath": ".", "every_n_epochs": 5}),
    ],
)
def test_a_stopped_run_says_where_to_go_on(
    number: int, name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: Patches
) -> None:
    def stop(trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 2:
            os.kill(os.getpid(), number)

    said = list[str]()
    monkeypatch.setattr(checkpoints, "rank_zero_info", said.append)
    callbacks = [ModelCheckpoint(**options), LambdaCallback(on_train_batch_start=stop)]
    if name == "on_exception.ckpt":
        callbacks.append(OnExceptionCheckpoint(tmp_path))
    trainer = make_trainer(*callbacks, num_stages=1, epochs=9)
    with pytest.raises(SystemExit):
        trainer.fit(make_module(), datamodule=make_data())
    found, step = str(tmp_path / name), 2 + (number == signal.SIGTERM)
    text = f'Stopped after step {step}. trainer.fit(ckpt_path="{found}") goes on from step {step}.'
    assert said == ([text] if name else [])
    if name:
        make_trainer(num_stages=1).fit(make_module(), datamodule=make_data(), ckpt_path=found)


def test_a_checkpoint_written_in_the_background_goes_on() -> None:
    whole, _ = fit("a", epochs=5, num_stages=1)
    _, path = fit("b", num_stages=1, checkpoint_io=AsyncCheckpointIO())
    again, _ = fit("c", epochs=5, num_stages=1, resume=path)
    assert torch.equal(again, whole)


class Fails(L.Callback):
    """Does what Lightning does where a rank fails by itself, as under popen."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 3 and trainer.global_rank == 0:
            error = KeyError("the user's mistake")
            call._interrupt(trainer, error)
            raise error


def test_a_rank_that_fails_alone_saves_all_weights(tmp_path: Path) -> None:
    """And no histories, so that the first step after it is exact."""
    with pytest.raises(Exception, match="the user's mistake"):
        fit("a", Fails(), OnExceptionCheckpoint(tmp_path), epochs=5, timeout=timedelta(seconds=20))
    path = tmp_path / "on_exception.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["epoch"] == 3 and all(one.numel() for one in saved["state_dict"].values())
    assert kinds_after(path, epochs=5) == [True, False]


@pytest.mark.parametrize("weights_only", [None, True])
def test_code_is_refused_unless_it_is_trusted(
    weights_only: bool | None, monkeypatch: Patches
) -> None:
    """Whatever the default of torch.load and of Lightning is."""
    torch.save({"state_dict": {}, "more": EXPLODES}, "some.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        AtomicCheckpointIO().load_checkpoint("some.ckpt", weights_only=weights_only)
    assert not Path("exploded").exists()
    if weights_only is None:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        AtomicCheckpointIO().load_checkpoint("some.ckpt")
        Path("exploded").unlink()  # it was there


def test_ctrl_c_within_a_save_is_that_and_leaves_the_last_checkpoint(
    folder: Path, monkeypatch: Patches
) -> None:
    """torch fails to close the archive, in place of KeyboardInterrupt."""
    path, save, writer = folder / "last.ckpt", torch.save, AtomicCheckpointIO()
    writer.save_checkpoint({"step": 1}, path)

    class Cut:
        def __init__(self, file: Any) -> None:
            self._file, self._num_writes = file, 0

        def write(self, content: Any) -> int:
            self._num_writes += 1
            if self._num_writes == 3:
                raise KeyboardInterrupt
            return self._file.write(content)

        def flush(self) -> None:
            self._file.flush()

    monkeypatch.setattr(torch, "save", lambda content, file: save(content, Cut(file)))
    with pytest.raises(KeyboardInterrupt):
        writer.save_checkpoint({"step": torch.ones(2**20)}, path)
    assert [one.name for one in folder.iterdir()] == ["last.ckpt"]
    assert writer.load_checkpoint(path) == {"step": 1}


def test_the_home_folder_is_meant_by_its_short_name(tmp_path: Path, monkeypatch: Patches) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    trainer = make_trainer(num_stages=1, epochs=1)
    trainer.fit(make_module(), make_data())
    trainer.save_checkpoint("~/runs/one.ckpt")
    path = tmp_path / "home" / "runs" / "one.ckpt"
    assert path.exists() and not Path("~").exists()


def test_a_process_whose_ranks_have_ended_saves_a_checkpoint(tmp_path: Path) -> None:
    """As `trainer.save_checkpoint` in the cell after `trainer.fit`."""
    module, trainer = make_module(), make_trainer(epochs=2)
    trainer.fit(module, make_data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(found, module.state_dict(), rtol=0, atol=0)

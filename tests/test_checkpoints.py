"""Checkpoints: whole or not there, stock or sharded; a damaged one ends all ranks with a reason."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from packaging.version import Version
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.errors import CheckpointError
from lightning_gnnpipe.models import GNN, NodeClassifier
from lightning_gnnpipe.saving import sharded, sidecar
from lightning_gnnpipe.saving.sharded import load_shards, read_sharded
from lightning_gnnpipe.trainer import _compat, checkpoints
from lightning_gnnpipe.trainer.checkpoints import AtomicCheckpointIO
from tests.helpers.cases import covering, slow


def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(40, 4, generator=generator),
        edge_index=torch.randint(0, 40, (2, 160), generator=generator),
        y=torch.randint(0, 3, (40,), generator=generator),
    )


def module() -> NodeClassifier:
    L.seed_everything(1, verbose=False)
    return NodeClassifier(GNN(4, 8, 3, num_layers=4, dropout=0.2), 3)


class NotesKind(L.Callback):
    def __init__(self) -> None:
        self.was_exact: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.was_exact.append(trainer.strategy.collect_stats().is_exact)


def fit(
    folder: Path,
    *callbacks: L.Callback,
    num_stages: int = 2,
    num_shards: int = 1,
    epochs: int = 3,
    resume: Path | None = None,
    **options: Any,
) -> tuple[NodeClassifier, Path]:
    """Train; return the module and the last checkpoint."""
    trained = module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=max(num_stages, 1) * num_shards,
        strategy=GNNPipeStrategy(
            num_chunks=4, start_method="fork", graph_parallel=num_shards, **options
        )
        if num_stages
        else "auto",
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_last=True), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(trained, datamodule=FullGraphDataModule(data()), ckpt_path=resume)
    return trained, folder / "last.ckpt"


def weights(one: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in one.parameters()])


@pytest.fixture(scope="module")
def once_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("once") / "saved")[1]


@pytest.fixture
def saved(once_saved: Path, tmp_path: Path) -> Path:
    """A checkpoint of the test's own, of two stages after three epochs, next to its histories."""
    shutil.copytree(once_saved.parent, tmp_path / "saved", symlinks=True)
    return tmp_path / "saved" / once_saved.name


def test_histories_of_checkpoints_that_are_gone_are_gone(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="train_loss", save_top_k=2)
    fit(tmp_path, saver, epochs=6)
    checkpoints = list(tmp_path.glob("*.ckpt"))
    used = {torch.load(path, weights_only=True)["gnnpipe"]["histories"] for path in checkpoints}
    assert {path.name for path in (tmp_path / ".gnnpipe").iterdir()} == used
    assert not list(tmp_path.glob(".*.part"))


def test_a_plain_trainer_goes_on_from_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    plain, _ = fit(tmp_path / "plain", num_stages=0, epochs=4, resume=saved)
    again = NodeClassifier.load_from_checkpoint(
        saved, net=GNN(4, 8, 3, num_layers=4, dropout=0.2), num_classes=3
    )
    assert torch.isfinite(weights(plain)).all()
    assert not torch.equal(weights(again), weights(plain))


@pytest.mark.parametrize("to_host", [True, False])
def test_a_checkpoint_goes_on_on_another_device(to_host: bool, tmp_path: Path) -> None:
    """From the CPU to the device of `scripts/check_gpu.sh`, and back; else both are the CPU."""

    def run(folder: Path, place: Any, epochs: int, resume: Path | None = None) -> Any:
        L.seed_everything(1, verbose=False)
        trainer = L.Trainer(
            accelerator=place,
            devices=1,
            precision="64-true",
            strategy=GNNPipeStrategy(num_chunks=4),
            max_epochs=epochs,
            callbacks=[ModelCheckpoint(folder, save_last=True)],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        net, graph = NodeClassifier(GNN(4, 8, 3, num_layers=4), 3), data()
        graph.x = graph.x.double()
        trainer.fit(net, datamodule=FullGraphDataModule(graph), ckpt_path=resume)
        return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]

    places = ("cpu", CPUAccelerator())  # the script moves what asks for "cpu"
    first, then = places if to_host else places[::-1]
    expected = run(tmp_path / "whole", CPUAccelerator(), 6)
    run(tmp_path / "half", first, 3)
    found = run(tmp_path / "rest", then, 6, tmp_path / "half" / "last.ckpt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)  # Adam adds to rounding


def test_without_its_histories_a_checkpoint_goes_on_exactly_and_says_so(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moved = tmp_path / "moved.ckpt"
    shutil.copy(saved, moved)
    kinds = NotesKind()
    with caplog.at_level(logging.WARNING, "lightning_gnnpipe"):
        fit(tmp_path / "again", kinds, num_stages=1, epochs=5, resume=moved)
    assert kinds.was_exact == [True, False]
    assert "no histories of this input" in caplog.text


def test_a_link_to_a_checkpoint_finds_its_histories(saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.ckpt"
    link.symlink_to(saved)
    kinds = NotesKind()
    fit(tmp_path / "again", kinds, num_stages=1, epochs=4, resume=link)
    assert kinds.was_exact == [False]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "noise":
        path.write_bytes(bytes(range(256)) * 8)
    elif how == "foreign":
        torch.save({"weights": torch.ones(3)}, path)
    elif how == "code":
        path.write_bytes(pickle.dumps(Explosive()))
    elif how == "format":
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["gnnpipe"]["run"]["version"] = 0
        torch.save(checkpoint, path)
    elif how == "id":
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["gnnpipe"]["histories"] = f"../.gnnpipe/{checkpoint['gnnpipe']['histories']}"
        torch.save(checkpoint, path)


class Explosive:
    """Pickled, it makes a file where it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


def test_histories_are_read_from_no_other_place(saved: Path, tmp_path: Path) -> None:
    damage(saved, "id")
    with pytest.raises(CheckpointError, match=r"the id of histories in .* \(got '\.\./\.gnnpipe/"):
        fit(tmp_path / "again", num_stages=1, resume=saved)


@pytest.mark.parametrize(
    ("how", "num_stages"),
    covering(["empty", "truncated", "noise", "foreign", "code", "format"], [1, 2]),
)
def test_a_damaged_checkpoint_ends_all_ranks_with_a_reason(
    saved: Path, how: str, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(saved, how)
    error = Exception if num_stages > 1 else CheckpointError
    with pytest.raises(error, match=r"Expected a checkpoint|Expected the state of a pipeline"):
        fit(tmp_path / "again", num_stages=num_stages, resume=saved)
    assert not Path("exploded").exists()


@pytest.mark.parametrize("how", ["truncated", "code"])
def test_damaged_histories_end_all_ranks_with_a_reason(
    saved: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ident = torch.load(saved, weights_only=True)["gnnpipe"]["histories"]
    damage(saved.parent / ".gnnpipe" / ident / "stage_1.pt", how)
    with pytest.raises(Exception, match="Expected the histories of stage 1 of 2"):
        fit(tmp_path / "again", resume=saved)
    assert not Path("exploded").exists()


def test_a_save_that_is_cut_off_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.ckpt"
    AtomicCheckpointIO().save_checkpoint({"n": 1}, path)

    def cut_off(value: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"n": 2}, path)
    assert torch.load(path, weights_only=True) == {"n": 1}


@pytest.mark.parametrize(
    ("first", "second"), [(1, 2), (2, 1), *(slow(*one) for one in ((1, 1), (2, 2), (2, 3), (3, 2)))]
)
def test_a_sharded_checkpoint_goes_on_like_a_stock_one(
    first: int, second: int, tmp_path: Path
) -> None:
    fit(tmp_path / "stock", num_stages=first)
    fit(tmp_path / "sharded", num_stages=first, save_distributed_checkpoint=True)
    stock, sharded = tmp_path / "stock" / "last.ckpt", tmp_path / "sharded" / "last.ckpt"
    assert (sharded / "meta.pt").is_file() and (sharded / "histories" / "stage_0.pt").is_file()
    found, expected = read_sharded(sharded), torch.load(stock, weights_only=True)
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(
        found["optimizer_states"], expected["optimizer_states"], rtol=0, atol=0
    )
    a, _ = fit(tmp_path / "a", num_stages=second, epochs=5, resume=stock)
    b, _ = fit(tmp_path / "b", num_stages=second, epochs=5, resume=sharded)
    assert torch.equal(weights(a), weights(b))


@pytest.mark.parametrize(
    ("file", "how"),
    covering(
        ["meta.pt", ".metadata", "__0_0.distcp", "histories/stage_0.pt"],
        ["code", "truncated", "noise"],
    ),
)
def test_a_damaged_sharded_checkpoint_is_refused(
    file: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, path = fit(tmp_path / "sharded", num_stages=1, save_distributed_checkpoint=True)
    damage(path / file, how)
    with pytest.raises(CheckpointError, match="Expected"):
        fit(tmp_path / "again", num_stages=1, resume=path)
    assert not Path("exploded").exists()


def test_metadata_of_shards_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Explosive()))
    with pytest.raises(CheckpointError, match="no part of a checkpoint's metadata"):
        load_shards(tmp_path)
    assert not Path("exploded").exists()


class SavesEarly(L.Callback):
    """Saves before the first step of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("num_stages", [1, slow(2)])
def test_a_resumed_run_that_saves_before_its_first_step_keeps_the_histories(
    saved: Path, num_stages: int, tmp_path: Path
) -> None:
    early = tmp_path / "early.ckpt"
    whole, _ = fit(tmp_path / "a", num_stages=num_stages, epochs=5, resume=saved)
    fit(tmp_path / "b", SavesEarly(early), num_stages=num_stages, epochs=4, resume=saved)
    again, _ = fit(tmp_path / "c", num_stages=num_stages, epochs=5, resume=early)
    assert torch.equal(weights(again), weights(whole))


@pytest.mark.parametrize("validates", [False, True])
def test_a_run_saved_when_it_is_over_goes_on_from_an_exact_step(
    validates: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "over.ckpt"
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = L.Trainer(strategy=GNNPipeStrategy(num_chunks=4), max_epochs=3, **options)
    trained = module()
    trainer.fit(trained, datamodule=FullGraphDataModule(data()))
    if validates:
        trainer.validate(trained, datamodule=FullGraphDataModule(data()), verbose=False)
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["gnnpipe"]
    assert state["run"]["num_training_passes"] == 3 and state["histories"] is None
    kinds = NotesKind()
    with caplog.at_level(logging.WARNING, logger="lightning_gnnpipe"):
        fit(tmp_path / "again", kinds, num_stages=1, epochs=5, resume=path)
    assert kinds.was_exact == [True, False]
    assert "has no histories of this input" in caplog.text


@pytest.mark.parametrize(
    ("stages", "shards", "is_sharded"),
    [(1, 2, True), slow(1, 2, False), slow(2, 2, True), slow(2, 2, False)],
)
def test_p6_a_run_on_shards_goes_on(
    stages: int, shards: int, is_sharded: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_stages": stages, "num_shards": shards}
    options["save_distributed_checkpoint"] = is_sharded
    whole, _ = fit(tmp_path / "a", epochs=5, **options)
    _, path = fit(tmp_path / "b", **options)
    again, _ = fit(tmp_path / "c", epochs=5, resume=path, **options)
    assert torch.equal(weights(again), weights(whole))
    kinds = NotesKind()
    fit(tmp_path / "d", kinds, epochs=4, num_stages=1, resume=path)
    assert kinds.was_exact == [False]


class RunsOnRankOne:
    """Finds no histories on rank 1."""

    def __init__(self) -> None:
        self.original = sidecar.read_stages

    def __call__(self, folder: Path, num_stages: int) -> Any:
        rank = torch.distributed.get_rank()
        return () if rank == 1 else self.original(folder, num_stages)


def test_histories_that_one_rank_does_not_see_are_taken_by_none(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "read_stages", RunsOnRankOne())
    fit(tmp_path / "again", epochs=4, resume=saved, timeout=timedelta(seconds=20))


class ExpectsExact(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert trainer.strategy.collect_stats().is_exact


def test_hosts_without_a_common_disk_go_on_from_an_exact_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes to a disk of its own."""
    original, disk = checkpoints._local_path, tmp_path / "disk"

    def on_own_disk(path: Any) -> Path | None:
        found = original(path)
        is_first = found is None or torch.distributed.get_rank() == 0
        return found if is_first else disk / found.name

    monkeypatch.setattr(checkpoints, "_local_path", on_own_disk)
    _, path = fit(tmp_path / "saved")
    for folder, stage in ((path.parent, 0), (disk, 1)):
        found = list(folder.glob(".gnnpipe/*"))
        assert found and not [one for one in found if one.suffix == ".part"]
        assert all((one / f"stage_{stage}.pt").is_file() for one in found)
    fit(tmp_path / "again", ExpectsExact(), epochs=4, resume=path)


def test_what_another_run_deletes_meanwhile_ends_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.ckpt"
    for ident in "ab":
        sidecar.write_stage(sidecar.unfinished_folder(path, ident), 0, {})
        sidecar.finish(path, ident)
    sidecar.write_stage(sidecar.unfinished_folder(path, "c"), 0, {})
    found, glob = sorted((tmp_path / ".gnnpipe").glob("*")), Path.glob

    def deleted(self: Path, pattern: str) -> Any:
        shutil.rmtree(found[0], ignore_errors=True)
        shutil.rmtree(found[2], ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "glob", deleted)
    sidecar.prune(path, None)
    assert not list(glob(tmp_path, ".gnnpipe"))


def test_a_learning_rate_finder_leaves_no_histories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = NotesKind()
    finder = LearningRateFinder(num_training_steps=6, update_attr=False)
    finder.lr_find = lambda trainer, module: find(trainer, module)  # type: ignore[method-assign]

    def find(trainer: L.Trainer, module: L.LightningModule) -> None:
        module.lr = 0.01
        LearningRateFinder.lr_find(finder, trainer, module)

    fit(tmp_path, finder, kinds, num_stages=1, epochs=2)
    assert kinds.was_exact[-2:] == [True, False]


class StopsAfter(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("options", [{"save_weights_only": True}, {"save_top_k": -1}])
def test_sigterm_leaves_a_last_checkpoint_to_go_on_from(
    options: dict[str, Any], tmp_path: Path
) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=GNNPipeStrategy(num_chunks=4),
        max_epochs=9,
        callbacks=[
            ModelCheckpoint(tmp_path, save_on_train_epoch_end=True, **options),
            StopsAfter(),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    with pytest.raises(SystemExit):
        trainer.fit(module(), datamodule=FullGraphDataModule(data()))
    assert "optimizer_states" in torch.load(tmp_path / "last-sigterm.ckpt", weights_only=True)


def test_what_another_run_is_writing_stays(tmp_path: Path) -> None:
    folder = sidecar.unfinished_folder(tmp_path / "other.ckpt", "b")
    old = sidecar.unfinished_folder(tmp_path / "other.ckpt", "c")
    for one in (folder, old):
        sidecar.write_stage(one, 0, {})
    os.utime(old, (0, 0))
    sidecar.prune(tmp_path / "one.ckpt", None)
    assert folder.is_dir() and not old.exists()


def test_a_checkpoint_that_is_written_later_leaves_the_histories_of_the_last_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "one.ckpt"
    for age, ident in enumerate("abc"):
        sidecar.write_stage(sidecar.unfinished_folder(path, ident), 0, {})
        sidecar.finish(path, ident)
        os.utime(sidecar.histories_folder(path, ident), (age, age))
    sidecar.prune(path, "c", keeps_last=True)
    left = [one for one in "abc" if sidecar.histories_folder(path, one).is_dir()]
    assert left == ["b", "c"]


def test_a_checkpoint_written_in_the_background_goes_on(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "a", epochs=5, num_stages=1)
    _, path = fit(tmp_path / "b", num_stages=1, checkpoint_io=AsyncCheckpointIO())
    again, _ = fit(tmp_path / "c", epochs=5, num_stages=1, resume=path)
    assert torch.equal(weights(again), weights(whole))


def test_a_sharded_checkpoint_takes_the_place_of_a_link(tmp_path: Path) -> None:
    first, path = tmp_path / "first.ckpt", tmp_path / "last.ckpt"
    first.mkdir()
    path.symlink_to(first)
    sharded.part_of(path).mkdir()
    (sharded.part_of(path) / "new").touch()
    sharded.put_in_place(path)
    assert (path / "new").exists() and not path.is_symlink() and first.is_dir()
    assert not sharded.part_of(path).is_symlink()


class SavesByRank(L.Callback):
    """Each rank names another file, as with a time in the name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.folder / f"of_{trainer.global_rank}" / "one.ckpt")


@pytest.mark.parametrize("is_sharded", [slow(False), True])
def test_all_ranks_write_where_the_first_one_says(is_sharded: bool, tmp_path: Path) -> None:
    fit(tmp_path / "a", SavesByRank(tmp_path), save_distributed_checkpoint=is_sharded)
    assert not (tmp_path / "of_1").exists()
    kinds = NotesKind()
    fit(tmp_path / "b", kinds, num_stages=1, resume=tmp_path / "of_0" / "one.ckpt")
    assert kinds.was_exact == [False]


class Fails(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 3 and trainer.global_rank == 0:
            _interrupt_alone(trainer)


def _interrupt_alone(trainer: L.Trainer) -> None:
    """Do what Lightning does where a rank fails by itself, as under popen."""
    try:
        raise KeyError("the user's mistake")
    except KeyError as error:
        _compat.interrupt(trainer, error)
        raise


@pytest.mark.parametrize("last", [True, "link"])
def test_a_rank_that_fails_alone_waits_for_nobody_and_keeps_the_last_checkpoint(
    last: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(
        tmp_path / "c", filename="{epoch}", every_n_epochs=2, save_last=last, save_on_exception=True
    )
    saver_of_exceptions = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(Exception, match="the user's mistake"):
        fit(
            tmp_path / "a",
            Fails(),
            saver_of_exceptions,
            saver,
            epochs=5,
            timeout=timedelta(seconds=20),
        )
    # Before Lightning 2.6 the last one is saved in each epoch, unless it is a link.
    epoch = 2 if last is True and Version(L.__version__) < Version("2.6") else 1
    assert torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)["epoch"] == epoch


@pytest.mark.parametrize("attribute", [(Path, "home"), (torch.Size, "count")])
def test_metadata_of_shards_reads_no_attributes(attribute: object, tmp_path: Path) -> None:
    """Python 3.11 writes a member of an enum as a call of `getattr`: it is good for that alone."""

    class Reads:
        def __reduce__(self) -> Any:
            return getattr, attribute

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Reads()))
    with pytest.raises(CheckpointError, match="no part of a checkpoint's metadata"):
        load_shards(tmp_path)


@pytest.mark.parametrize("weights_only", [None, True])
def test_a_checkpoint_that_holds_code_is_refused_unless_it_is_trusted(
    weights_only: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the default of torch.load and of Lightning is."""
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "more": Explosive()}, tmp_path / "some.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "some.ckpt", weights_only=weights_only)
    assert not Path("exploded").exists()
    if weights_only is None:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        AtomicCheckpointIO().load_checkpoint(tmp_path / "some.ckpt")
        assert Path("exploded").exists()

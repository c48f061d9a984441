"""Checkpoints: whole or not there, stock or sharded; a damaged one ends all ranks with a reason."""

from __future__ import annotations

import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data

from lightning_gnnpipe import FullGraphDataModule, GNNPipeStrategy
from lightning_gnnpipe.checkpoint_io import AtomicCheckpointIO
from lightning_gnnpipe.comm import load_shards
from lightning_gnnpipe.errors import CheckpointError
from lightning_gnnpipe.models import GCN, NodeClassifier
from lightning_gnnpipe.sharded import read_sharded


def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(40, 4, generator=generator),
        edge_index=torch.randint(0, 40, (2, 160), generator=generator),
        y=torch.randint(0, 3, (40,), generator=generator),
    )


def module() -> NodeClassifier:
    L.seed_everything(1, verbose=False)
    return NodeClassifier(GCN(4, 8, 3, num_layers=4, dropout=0.2), 3)


class NotesKind(L.Callback):
    def __init__(self) -> None:
        self.was_exact: list[bool] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.was_exact.append(trainer.strategy.collect_stats().is_exact)


def fit(
    folder: Path,
    *callbacks: L.Callback,
    num_stages: int = 2,
    epochs: int = 3,
    resume: Path | None = None,
    **options: Any,
) -> tuple[NodeClassifier, Path]:
    """Train; return the module and the last checkpoint."""
    trained = module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=max(num_stages, 1),
        strategy=GNNPipeStrategy(num_chunks=4, start_method="fork", **options)
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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return fit(tmp_path / "saved")[1]


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
        saved, net=GCN(4, 8, 3, num_layers=4, dropout=0.2), num_classes=3
    )
    assert torch.isfinite(weights(plain)).all()
    assert not torch.equal(weights(again), weights(plain))


def test_without_its_histories_a_checkpoint_goes_on_exactly_and_says_so(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moved = tmp_path / "moved.ckpt"
    shutil.copy(saved, moved)
    kinds = NotesKind()
    with caplog.at_level(logging.WARNING, "lightning_gnnpipe"):
        fit(tmp_path / "again", kinds, num_stages=1, epochs=5, resume=moved)
    assert kinds.was_exact == [True, False]
    assert "no histories of this graph" in caplog.text


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


class Explosive:
    """Pickled, it makes a file where it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("how", ["empty", "truncated", "noise", "foreign", "code", "format"])
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


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2)])
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


@pytest.mark.parametrize("file", ["meta.pt", ".metadata", "__0_0.distcp", "histories/stage_0.pt"])
@pytest.mark.parametrize("how", ["truncated", "noise", "code"])
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

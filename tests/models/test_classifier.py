"""NodeClassifier works in a plain Trainer: it logs, learns, selects, tests and predicts."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data

from lightning_gnnpipe.datamodule import FullGraphDataModule
from lightning_gnnpipe.models import GCNII, NodeClassifier


@pytest.fixture
def data() -> Data:
    """Two cliques of eight nodes, one class each; the features say it with noise."""
    clique = torch.combinations(torch.arange(8)).t()
    edges = torch.cat([clique, clique + 8], dim=1)
    y = torch.arange(2).repeat_interleave(8)
    noise = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.one_hot(y, 2).float() + 0.5 * noise
    return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=y)


def build_classifier(**kwargs: float) -> NodeClassifier:
    torch.manual_seed(0)
    return NodeClassifier(GCNII(2, 8, 2, num_layers=4, dropout=0.1), num_classes=2, **kwargs)


def build_trainer(folder, **kwargs) -> L.Trainer:
    options = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    options |= dict(enable_model_summary=False, default_root_dir=folder)
    return L.Trainer(**(options | kwargs))


def test_trains_and_logs_in_a_plain_trainer(data, tmp_path):
    module, datamodule = build_classifier(lr=0.05), FullGraphDataModule(data)
    best = ModelCheckpoint(tmp_path, monitor="val_acc", mode="max")
    trainer = build_trainer(tmp_path, max_epochs=20, callbacks=[best])
    trainer.fit(module, datamodule=datamodule)
    logged = trainer.callback_metrics
    assert {"train_loss", "train_acc", "val_loss", "val_acc"} <= set(logged)
    assert logged["train_loss"] < 0.2
    assert logged["train_acc"] == 1.0

    [tested] = trainer.test(module, datamodule=datamodule, ckpt_path="best", verbose=False)
    assert tested == {"test_acc": 1.0}


def test_logged_loss_and_accuracy_are_those_of_the_mask(data, tmp_path):
    module, datamodule = build_classifier(), FullGraphDataModule(data)
    trainer = build_trainer(tmp_path)
    [logged] = trainer.validate(module, datamodule=datamodule, verbose=False)
    graph = datamodule.data
    with torch.no_grad():
        logits = module.eval()(graph)[graph.val_mask]
    labels = graph.y[graph.val_mask]
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert logged["val_loss"] == pytest.approx(loss.item())
    assert logged["val_acc"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_predicts_the_logits_of_all_nodes(data, tmp_path):
    module, datamodule = build_classifier(), FullGraphDataModule(data)
    [logits] = build_trainer(tmp_path).predict(module, datamodule=datamodule)
    assert logits.shape == (16, 2)
    torch.testing.assert_close(logits, module.eval()(datamodule.data).detach())


def test_checkpoint_restores_options_and_weights(data, tmp_path):
    module = build_classifier(lr=0.02, weight_decay=0.0)
    trainer = build_trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, datamodule=FullGraphDataModule(data))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    net = GCNII(2, 8, 2, num_layers=4)
    loaded = NodeClassifier.load_from_checkpoint(tmp_path / "last.ckpt", net=net)
    assert (loaded.lr, loaded.weight_decay) == (0.02, 0.0)
    for name, tensor in module.net.state_dict().items():
        assert torch.equal(tensor, loaded.net.state_dict()[name]), name

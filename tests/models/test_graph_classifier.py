"""GraphClassifier works in a plain Trainer: it logs, learns, selects, tests and predicts."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torchmetrics.functional.classification import binary_auroc

from lightning_gnnpipe.models import GIN, GraphClassifier


@pytest.fixture
def graphs() -> list[Data]:
    """Thirty rings and paths of 4 to 8 nodes; the class says which, the features nothing."""
    graphs = []
    for n in range(30):
        size, is_ring = 4 + n % 5, n % 2
        source = torch.arange(size if is_ring else size - 1)
        edges = torch.stack([source, (source + 1) % size])
        edge_index = torch.cat([edges, edges.flip(0)], dim=1)
        graphs.append(Data(x=torch.ones(size, 1), edge_index=edge_index, y=torch.tensor([is_ring])))
    return graphs


def build(**options) -> GraphClassifier:
    torch.manual_seed(0)
    return GraphClassifier(GIN(1, 16, 2, 2, 0.0, pool="max"), 2, **({"lr": 0.01} | options))


def build_trainer(folder, **kwargs) -> L.Trainer:
    options = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    options |= dict(enable_model_summary=False, default_root_dir=folder)
    return L.Trainer(**(options | kwargs))


def load(graphs, batch_size=8, shuffle=False) -> DataLoader:
    return DataLoader(graphs, batch_size, shuffle=shuffle)


@pytest.mark.parametrize("metric", ["acc", "auroc"])
def test_trains_and_logs_in_a_plain_trainer(metric, graphs, tmp_path):
    module = build(metric=metric)
    best = ModelCheckpoint(tmp_path, monitor=f"val_{metric}", mode="max")
    trainer = build_trainer(tmp_path, max_epochs=30, callbacks=[best])
    trainer.fit(module, load(graphs[:20], shuffle=True), load(graphs[20:]))
    logged = trainer.callback_metrics
    assert {"train_loss", f"train_{metric}", "val_loss", f"val_{metric}"} <= set(logged)
    assert logged["train_loss"] < 0.2

    [tested] = trainer.test(module, load(graphs[20:]), ckpt_path="best", verbose=False)
    assert tested == {f"test_{metric}": 1.0}


def test_logged_figures_are_those_of_all_graphs_whatever_the_batches(graphs, tmp_path):
    """30 graphs in batches of 8, 8, 8 and 6: means weigh each graph the same."""
    module, labels = build(), torch.cat([graph.y for graph in graphs])
    with torch.no_grad():
        logits = torch.cat([module.eval()(batch) for batch in load(graphs, 7)])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    for metric, expected in {
        "acc": (logits.argmax(1) == labels).float().mean(),
        "auroc": binary_auroc(logits.softmax(1)[:, 1], labels),
    }.items():
        trainer = build_trainer(tmp_path)
        [logged] = trainer.validate(build(metric=metric), load(graphs), verbose=False)
        assert logged["val_loss"] == pytest.approx(loss.item())
        assert logged[f"val_{metric}"] == pytest.approx(expected.item())


def test_labels_may_stand_in_a_column_as_ogbs_do(graphs, tmp_path):
    [logged] = build_trainer(tmp_path).validate(build(), load(graphs), verbose=False)
    for graph in graphs:
        graph.y = graph.y.view(1, 1)
    assert build_trainer(tmp_path).validate(build(), load(graphs), verbose=False) == [logged]


def test_predicts_the_logits_of_all_graphs(graphs, tmp_path):
    module = build()
    batches = build_trainer(tmp_path).predict(module, load(graphs))
    assert [len(logits) for logits in batches] == [8, 8, 8, 6]


def test_the_network_is_called_with_the_inputs_that_are_named(graphs):
    class Taker(torch.nn.Module):
        def forward(self, *args):
            return args

    [batch] = load(graphs[:3], 3)
    ptr, x = GraphClassifier(Taker(), 2, inputs=("ptr", "x"))(batch)
    assert ptr is batch.ptr and x is batch.x


def test_checkpoint_restores_options_and_weights(graphs, tmp_path):
    module = build(lr=0.02, weight_decay=0.1, metric="auroc", inputs=["x", "edge_index", "batch"])
    trainer = build_trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, load(graphs))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    net = GIN(1, 16, 2, 2, 0.0, pool="max")
    loaded = GraphClassifier.load_from_checkpoint(tmp_path / "last.ckpt", net=net)
    assert (loaded.lr, loaded.weight_decay, loaded.metric) == (0.02, 0.1, "auroc")
    for name, tensor in module.net.state_dict().items():
        assert torch.equal(tensor, loaded.net.state_dict()[name]), name


def test_roc_needs_two_classes():
    with pytest.raises(ValueError, match=r"Expected two classes.*\(got 3\).*metric='acc'"):
        GraphClassifier(GIN(1, 8, 3), 3, metric="auroc")

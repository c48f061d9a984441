"""The classifiers work in a plain Trainer: they log, predict and are restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torchmetrics.functional.classification import binary_auroc

from lightning_gnnpipe.datamodule import FullGraphDataModule
from lightning_gnnpipe.models import GCNII, GIN, GraphClassifier, NodeClassifier
from tests.helpers.trainers import quiet_trainer


@pytest.fixture
def nodes() -> FullGraphDataModule:
    """Two cliques of eight nodes, one class each; the features say it with noise."""
    clique = torch.combinations(torch.arange(8)).t()
    edges = torch.cat([clique, clique + 8], dim=1)
    y = torch.arange(2).repeat_interleave(8)
    noise = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    x = F.one_hot(y, 2).float() + 0.5 * noise
    return FullGraphDataModule(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=y))


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


def of_nodes(**options: Any) -> NodeClassifier:
    torch.manual_seed(0)
    return NodeClassifier(GCNII(2, 8, 2, num_layers=4, dropout=0.1), num_classes=2, **options)


def of_graphs(**options: Any) -> GraphClassifier:
    torch.manual_seed(0)
    return GraphClassifier(GIN(1, 16, 2, 2, 0.0, pool="max"), 2, **({"lr": 0.01} | options))


def load(graphs: list[Data], batch_size: int = 8, shuffle: bool = False) -> DataLoader:
    return DataLoader(graphs, batch_size, shuffle=shuffle)


def test_figures_of_nodes_are_those_of_the_mask_and_predictions_of_all(nodes):
    module, graph, trainer = of_nodes(), nodes.data, quiet_trainer()
    [logged] = trainer.validate(module, datamodule=nodes, verbose=False)
    with torch.no_grad():
        logits = module.eval()(graph)
    found, labels = logits[graph.val_mask], graph.y[graph.val_mask]
    assert logged["val_loss"] == pytest.approx(F.cross_entropy(found, labels).item())
    assert logged["val_acc"] == pytest.approx((found.argmax(1) == labels).float().mean().item())
    [predicted] = trainer.predict(module, datamodule=nodes)
    assert predicted.shape == (16, 2)
    torch.testing.assert_close(predicted, logits)


def test_figures_of_graphs_are_those_of_all_whatever_the_batches(graphs):
    """30 graphs in batches of 8, 8, 8 and 6: means weigh each graph the same."""
    module, labels = of_graphs(), torch.cat([graph.y for graph in graphs])
    trainer = quiet_trainer()
    with torch.no_grad():
        logits = torch.cat([module.eval()(batch) for batch in load(graphs, 7)])
    loss = F.cross_entropy(logits, labels)
    for metric, expected in {
        "acc": (logits.argmax(1) == labels).float().mean(),
        "auroc": binary_auroc(logits.softmax(1)[:, 1], labels),
    }.items():
        [logged] = trainer.validate(of_graphs(metric=metric), load(graphs), verbose=False)
        assert logged["val_loss"] == pytest.approx(loss.item())
        assert logged[f"val_{metric}"] == pytest.approx(expected.item())
    assert [len(found) for found in trainer.predict(of_graphs(), load(graphs))] == [8, 8, 8, 6]
    for graph in graphs:  # labels in a column, as OGB's are
        graph.y = graph.y.view(1, 1)
    again = trainer.validate(of_graphs(metric="auroc"), load(graphs), verbose=False)
    assert again == [logged]


def test_the_network_is_called_with_the_inputs_that_are_named(graphs):
    class Taker(torch.nn.Module):
        def forward(self, *args):
            return args

    [batch] = load(graphs[:3], 3)
    ptr, x = GraphClassifier(Taker(), 2, inputs=("ptr", "x"))(batch)
    assert ptr is batch.ptr and x is batch.x


@pytest.mark.parametrize("build", [of_nodes, of_graphs])
def test_checkpoint_restores_options_and_weights(build, nodes, graphs, tmp_path):
    options, more = {"lr": 0.02, "weight_decay": 0.3}, {}
    if build is of_graphs:
        options["metric"], more = "auroc", {"inputs": ["x", "edge_index", "batch"]}
    module = build(**options, **more)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, nodes if build is of_nodes else load(graphs))
    assert {"train_loss", f"train_{options.get('metric', 'acc')}"} <= set(trainer.callback_metrics)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = type(module).load_from_checkpoint(tmp_path / "last.ckpt", net=build().net)
    assert {name: getattr(loaded, name) for name in options} == options
    for name, tensor in module.net.state_dict().items():
        assert torch.equal(tensor, loaded.net.state_dict()[name]), name


def test_roc_needs_two_classes():
    with pytest.raises(ValueError, match=r"Expected two classes.*\(got 3\).*metric='acc'"):
        GraphClassifier(GIN(1, 8, 3), 3, metric="auroc")

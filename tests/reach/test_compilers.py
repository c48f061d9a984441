"""Networks that a compiler has seen, and modules of Lightning's other package."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn

import lightning_gnnpipe
from lightning_gnnpipe import GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.errors import ConfigError, UnsupportedError
from lightning_gnnpipe.models import NodeClassifier
from tests.helpers.alike import net_of
from tests.helpers.observed import NUM_CLASSES, NUM_FEATURES, WIDTH, make_data
from tests.helpers.trainers import double_precision, quiet_trainer


@torch.compile(backend="eager")
def squared(x: Tensor) -> Tensor:
    return x * x


class Net(nn.Module):
    """Three convs, and between them a function that is compiled for itself."""

    def __init__(self) -> None:
        super().__init__()
        channels = [NUM_FEATURES, WIDTH, WIDTH, NUM_CLASSES]
        self.convs = nn.ModuleList(map(gnn.GCNConv, channels, channels[1:]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = squared(conv(x, edge_index)).tanh()
        return x


class Decorated(Net):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index)


def in_place(net: Net) -> Net:
    net.compile(backend="eager")
    return net


def layers(net: Net) -> Net:
    net.convs = nn.ModuleList(torch.compile(one, backend="eager") for one in net.convs)
    return net


def decorated(net: Net) -> Net:
    net.__class__ = Decorated
    return net


PIPED = {"num_chunks": 4}
WAYS: dict[str, Any] = {
    "module": lambda net: torch.compile(net, backend="eager"),
    "default backend": torch.compile,
    "in place": in_place,
    "layers": layers,
    "forward": decorated,
}


def fit(change: Any, **options: Any) -> tuple[L.LightningModule, dict[str, Tensor]]:
    with double_precision():
        L.seed_everything(3, verbose=False)
        module = NodeClassifier(change(Net()), NUM_CLASSES)
        data = make_data()
        data.data.x = data.data.x.double()
        trainer = quiet_trainer(max_epochs=3, **options)
        trainer.fit(module, datamodule=data)
    return module, {name.replace("_orig_mod.", ""): p for name, p in module.named_parameters()}


@cache
def plain() -> dict[str, Tensor]:
    return fit(lambda net: net)[1]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("way", list(WAYS))
def test_what_is_compiled_trains_as_it_is_written_and_says_so(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the default backend a plain Trainer would compile for a minute."""
    exact = [StalenessWarmup(num_epochs=9)]
    module, found = fit(WAYS[way], piped=PIPED, callbacks=exact)
    for name, weight in plain().items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-9)
    texts = [text for text in caplog.messages if "compiled" in text]
    assert len(texts) == 1 and "runs without torch.compile, since" in texts[0]
    if way == "module":
        assert texts[0].startswith("net runs")
        assert next(iter(module.state_dict())).startswith("net._orig_mod.")
    named = {"pipelined_module": "net"} if way == "module" else {}
    fit(WAYS[way], piped=PIPED | named)  # in chunks


def test_what_is_compiled_is_compiled_again_afterwards() -> None:
    module, _ = fit(WAYS["module"], piped=PIPED)
    assert hasattr(module.net.forward, "_torchdynamo_orig_callable")
    fit(WAYS["forward"], piped=PIPED)
    assert hasattr(Decorated.forward, "_torchdynamo_orig_callable")


def test_a_second_name_of_a_compiled_module_is_no_second_network() -> None:
    def twice(net: Net) -> nn.Module:
        def forward(holder: Any, x: Tensor, edge_index: Tensor) -> Tensor:
            return holder.fast(x, edge_index)

        fast = torch.compile(net, backend="eager")
        return net_of(nn.Module, forward, net=lambda: net, fast=lambda: fast)()

    fit(twice, piped=PIPED)


def test_a_compiled_network_is_planned() -> None:
    module = NodeClassifier(torch.compile(Net()), NUM_CLASSES)
    plan = GNNPipeStrategy(num_chunks=4).plan(module, make_data(), num_stages=2)
    assert len(plan.layer_names) == 3


CONV = gnn.SAGEConv(NUM_FEATURES, NUM_CLASSES)


def scripted(_: Net) -> nn.Module:
    return torch.jit.script(CONV)


def traced(_: Net) -> nn.Module:
    data = make_data().data
    return torch.jit.trace(CONV.double(), (data.x.double(), data.edge_index))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", [scripted, traced])
def test_networks_of_torch_jit_are_refused_at_once(way: Any) -> None:
    text = r"message-passing layers in Python \(got 'net', which torch\.jit has compiled\)\. Use"
    with pytest.raises(UnsupportedError, match=text):
        fit(way, piped=PIPED)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layer_of_torch_jit_among_others_is_refused() -> None:
    def mixed(net: Net) -> Net:
        net.convs[1] = torch.jit.script(gnn.SAGEConv(WIDTH, WIDTH))
        return net

    text = r"'convs\.1', a \w+: torch\.jit has compiled its message passing"
    with pytest.raises(UnsupportedError, match=text):
        fit(mixed, piped=PIPED)


def test_a_name_of_the_strategy_in_the_other_package_says_which_import_to_use() -> None:
    other = pytest.importorskip("pytorch_lightning")
    importlib.reload(lightning_gnnpipe)  # as if imported after the other package
    with pytest.raises(ConfigError, match=r"a Trainer of the package 'lightning'.*import lightn"):
        other.Trainer(accelerator="cpu", devices=1, strategy="gnnpipe")

"""Train a net plainly and under the strategy, and compare: weights, outputs, number of layers."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnnpipe.methods import flatten
from tests.helpers.trainers import quiet_trainer, weights

N, E, D = 45, 170, 5

Forward = Callable[[Any, Data], Any]


def graph(**changes: Any) -> Data:
    """Return a random graph with features and weights of edges, in float64."""
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(N, (2, E), generator=generator)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    draw = {"generator": generator, "dtype": torch.float64}
    given = {
        "edge_index": edge_index,
        "x": torch.randn(N, D, **draw),
        "pairs": torch.randint(N, (2, 31), generator=generator),
        "edge_attr": torch.rand(edge_index.size(1), 3, **draw),
    }
    return Data.from_dict(given | changes)


def on_features(net: Any, data: Data) -> Any:
    return net(data.x, data.edge_index)


def by_name(**more: Callable[[Data], Any]) -> Forward:
    """Return what calls a net with all that its parameters name: parts of the graph, or `more`."""

    def call(net: Any, data: Data) -> Any:
        _, *names = signature(type(net).forward).parameters
        return net(*(more[name](data) if name in more else data[name] for name in names))

    return call


def net_of(base: type[nn.Module], forward: Any, **parts: Callable[[], Any]) -> type[nn.Module]:
    """Return a subclass of `base` with the attributes that `parts` make."""

    class Net(base):  # type: ignore
        def __init__(self) -> None:
            super().__init__()
            for name, make in parts.items():
                setattr(self, name, make())

    Net.forward = forward
    return Net


class Fits(L.LightningModule):
    """Pulls each output towards numbers; keeps the outputs of validation."""

    def __init__(self, net: nn.Module, call: Forward) -> None:
        super().__init__()
        self.net, self.call = net, call
        self.outputs: list[Tensor] = []

    def training_step(self, data: Data, batch_idx: int) -> Tensor:
        outputs = [one for one in flatten(self.call(self.net, data)) if one.is_floating_point()]
        return sum((one - _numbers(one)).square().mean() for one in outputs)  # type: ignore

    def validation_step(self, data: Data, batch_idx: int) -> None:
        self.outputs = [one.clone() for one in flatten(self.call(self.net, data))]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def _numbers(like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).view(like.shape)


def fit(
    make: Callable[[], nn.Module],
    call: Forward = on_features,
    data: Data | None = None,
    num_chunks: int = 0,
    num_stages: int = 1,
    epochs: int = 3,
    **options: Any,
) -> Fits:
    """Train and validate; 0 chunks is plain Lightning."""
    torch.manual_seed(0)
    module = Fits(make().double(), call)
    batches = DataLoader([data or graph()], batch_size=None)
    piped = {"num_chunks": num_chunks, **options} if num_chunks else None
    trainer = quiet_trainer(num_stages, piped, max_epochs=epochs, num_sanity_val_steps=0)
    trainer.fit(module, batches, batches)
    return module


def assert_alike(
    make: Callable[[], nn.Module],
    call: Forward = on_features,
    data: Data | None = None,
    *,
    num_stages: int = 1,
    **options: Any,
) -> None:
    """One chunk trains as plain Lightning does; three chunks train, and validate exactly."""
    plain = fit(make, call, data)
    exact = fit(make, call, data, num_chunks=1, num_stages=num_stages, **options)
    torch.testing.assert_close(weights(exact), weights(plain), rtol=0, atol=1e-9)
    if num_stages > 1:
        return
    chunked = fit(make, call, data, num_chunks=3, **options)
    torch.manual_seed(0)
    assert not torch.equal(weights(chunked), weights(Fits(make().double(), call)))
    chunked.eval()
    with torch.no_grad():
        expected = flatten(call(chunked.net, data or graph()))
    for ours, theirs in zip(chunked.outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)

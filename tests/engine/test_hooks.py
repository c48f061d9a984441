"""Hooks of torch: on the pipelined module as plainly, on its layers and weights refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.errors import UnsupportedError
from tests.helpers.engines import one_process_engine

N, D = 23, 6
WHOLE, CHUNKS = torch.zeros(N, dtype=torch.int64), torch.arange(N) % 3

pytestmark = pytest.mark.usefixtures("double")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv(D, D) for _ in range(2))
        self.inner = nn.Sequential(nn.Linear(D, D), nn.ReLU())
        self.norm = nn.utils.weight_norm(nn.Linear(D, D))  # by a hook

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(self.inner(conv(x, edge_index))).tanh()
        return x


def make_net() -> Net:
    torch.manual_seed(1)
    return Net()


def make_batch() -> dict[str, Tensor]:
    number = torch.arange(56)
    edges = torch.stack([(number * 7 + number // 9) % N, (number * 5 + 1) % N])
    return {"x": torch.randn(N, D).requires_grad_(), "edge_index": edges}


def note(seen: list[Any]) -> Callable[..., None]:
    def hook(_: nn.Module, *values: Any) -> None:
        seen.extend(t.detach().clone() for t in _tensors(values))

    return hook


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for item in items for t in _tensors(item)] if isinstance(value, tuple | dict) else []


def run(net: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return what hooks on `net` see, and what comes out of a step in which they change things."""
    seen: list[Any] = []
    net.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"x": 2 * kwargs["x"]}), with_kwargs=True
    )
    net.register_forward_pre_hook(note(seen), with_kwargs=True)
    net.register_forward_hook(lambda _, args, out: out.clamp(max=0.2))
    net.register_forward_hook(note(seen), with_kwargs=True)
    net.register_full_backward_pre_hook(lambda _, grads: tuple(3 * g for g in grads))
    net.register_full_backward_hook(note(seen))
    out = net(**batch)
    out.register_hook(lambda grad: seen.append(grad.clone()))
    out.square().sum().backward()
    return [*seen, out.detach(), batch["x"].grad, *(p.grad for p in net.parameters())]


def test_hooks_on_the_pipelined_module_are_called_as_plainly() -> None:
    plain, net, batch = make_net(), make_net(), make_batch()
    own_batch = copy.deepcopy(batch)
    engine = one_process_engine(net, partition=CHUNKS)
    engine.controls.is_exact = True
    engine.attach()
    torch.testing.assert_close(run(net, own_batch), run(plain, batch))


PLACES: dict[str, tuple[Callable[[Net, Any], Any], str]] = {
    "conv": (lambda net, hook: net.convs[1].register_forward_hook(hook), "'convs.1', a SAGEConv"),
    "container": (lambda net, hook: net.inner.register_forward_hook(hook), "'inner', a Sequential"),
    "before": (lambda net, hook: net.inner[0].register_forward_pre_hook(hook), r"'inner\.0'"),
    "backward": (lambda net, hook: net.norm.register_full_backward_hook(hook), "'norm', a Linear"),
    "before backward": (
        lambda net, hook: net.norm.register_full_backward_pre_hook(hook),
        "'norm', a Linear",
    ),
    "messages": (
        lambda net, hook: net.convs[0].register_message_forward_hook(hook),
        r"'convs\.0', a SAGEConv",
    ),
    "all": (lambda net, hook: nn.modules.module.register_module_forward_hook(hook), "all modules"),
    "gradient": (
        lambda net, hook: net.convs[0].lin_l.weight.register_hook(hook),
        "p.grad is whole",
    ),
    "gradient, afterwards": (
        lambda net, hook: net.inner[0].bias.register_post_accumulate_grad_hook(hook),
        r"'inner\.0\.bias'",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_hooks_on_layers_and_weights_are_refused(name: str) -> None:
    """With the remedy."""
    register, message = PLACES[name]
    net = Net()
    engine = one_process_engine(net, partition=CHUNKS)
    handle = register(net, lambda *_: None)
    try:
        with pytest.raises(UnsupportedError, match=f"no hooks on .*{message}"):
            engine.forward((), make_batch())
    finally:
        handle.remove()
    engine.forward((), make_batch())


def test_hooks_on_weights_see_the_gradient_of_one_chunk() -> None:
    plain, net, batch = make_net(), make_net(), make_batch()
    engine = one_process_engine(net, partition=WHOLE)
    for one in (plain, net):
        for p in one.parameters():
            p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    engine.forward((), batch).square().sum().backward()
    plain(**batch).square().sum().backward()
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad)

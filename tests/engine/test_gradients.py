"""What a user does with inputs, outputs and hooks of the pipelined module: all is works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.autograd import grad

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.graph import tensors_in
from lightning_gnnpipe.steps.gradient_sums import _flatten
from tests.helpers.alike import net_of
from tests.helpers.engines import one_process_engine

N, D = 23, 6
WHOLE, CHUNKS = torch.zeros(N, dtype=torch.int64), torch.arange(N) % 3

pytestmark = pytest.mark.usefixtures("double")

Batch = dict[str, Tensor]


def make_batch() -> Batch:
    number, drawn = torch.arange(56), torch.Generator().manual_seed(0)
    edges = torch.stack([(number * 7 + number // 9) % N, (number * 5 + 1) % N])
    x, weight = torch.randn(N, D, generator=drawn), torch.rand(56, generator=drawn)
    return {"x": x, "edge_index": edges, "edge_weight": weight}


class Heads(nn.Module):
    """Two layers and what can be made of them: real, complex, integer, constant, an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.GraphConv(D, D), gnn.GraphConv(D, D)
        self.left, self.right, self.inner = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> dict[str, Any]:
        early = self.first(x, edge_index, edge_weight).tanh()
        late = self.second(early + self.inner(early).detach(), edge_index, edge_weight).tanh()
        left, right = self.left(late), self.right(late)
        return {
            "left": left,
            "right": right,
            "complex": torch.complex(left, right),
            "integer": left.argmax(-1),
            "detached": right.detach(),
            "input": x,
            "halves": (left[:, :3], left[:, 3:]),
            "twice": [left, left],
        }


def square(tensor: Tensor) -> Tensor:
    return (tensor.abs() ** 2).sum()


def changed(out: Any, batch: Batch) -> Tensor:
    left = out["left"]
    left[batch["edge_index"][0, :4]] = 0
    out["right"] += left
    return square(left) + out["right"].pow(3).sum()


def hooked(out: Any, batch: Batch) -> Tensor:
    out["left"].retain_grad()
    out["left"].register_hook(lambda grad: 3 * grad)
    batch["x"].register_hook(lambda grad: grad.clamp(max=0.1))
    loss = square(out["left"]) + out["left"].sum()
    loss.register_hook(lambda grad: grad * 2)
    return loss


def penalized(out: Any, batch: Batch) -> Tensor:
    (found,) = grad(square(out["left"]), out["left"], create_graph=True)
    return square(out["right"]) + square(found)


LOSSES: dict[str, Callable[[Any, Batch], Tensor]] = {
    "complex": lambda out, _: square(out["complex"]) + out["complex"].angle().sum(),
    "complex alone, real part": lambda out, _: out["complex"].real.pow(3).sum(),
    "two summed": lambda out, _: square(out["left"]) + 2 * square(out["right"] - 1),
    "one of two": lambda out, _: square(out["left"]),
    "the other": lambda out, _: square(out["right"]),
    "one output twice": lambda out, _: (out["left"] * out["left"].detach() * out["left"]).sum(),
    "one tensor under two names": lambda out, _: (out["twice"][0] * out["twice"][1]).sum(),
    "an input that is an output": lambda out, _: square(out["input"]) + square(out["left"]),
    "an input alone": lambda out, _: square(out["input"]),
    "views": lambda out, _: square(out["halves"][0]) * out["halves"][1].sum(),
    "integer": lambda out, _: nn.functional.one_hot(out["integer"], D).mul(out["right"]).sum(),
    "detached": lambda out, _: (out["detached"] * out["left"]).sum(),
    "changed in place": changed,
    "rectified in place": lambda out, _: (out["left"] * out["right"].relu_()).sum(),
    "hooks on tensors": hooked,
    "gradient of the rest of the loss": penalized,
    "summed in a subset": lambda out, _: torch.stack([out["left"], out["right"]])[:, ::2].sum(),
}


def run(net: nn.Module, call: Callable[..., Any], batch: Batch, loss: Any) -> list[Tensor | None]:
    """Return the loss, then all gradients."""
    for name in ("x", "edge_weight"):
        batch[name].requires_grad_()
    out = call(**batch)
    total = loss(out, batch)
    total.backward()
    return [total.detach(), *(t.grad for t in (*net.parameters(), *batch.values()))]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_plain_autograd(name: str) -> None:
    """With no gradient where plainly there is none: optimizers skip such weights."""
    plain, batch = Heads(), make_batch()
    net, own_batch = copy.deepcopy(plain), copy.deepcopy(batch)
    engine = one_process_engine(net, partition=CHUNKS)
    engine.controls.is_exact = True
    found = run(net, lambda **kw: engine.forward((), kw), own_batch, LOSSES[name])
    expected = run(plain, plain, batch, LOSSES[name])
    assert [one is None for one in found] == [one is None for one in expected]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_outputs_that_have_no_gradient_say_so_and_a_graph_may_be_retained() -> None:
    plain, batch = Heads(), make_batch()
    engine = one_process_engine(copy.deepcopy(plain), partition=CHUNKS)
    found, expected = engine.forward((), batch), plain(**batch)
    for name in ("left", "complex", "integer", "detached", "input"):
        assert found[name].requires_grad == expected[name].requires_grad, name
        assert found[name].dtype == expected[name].dtype
    square(found["left"]).backward(retain_graph=True)
    engine.forward((), batch)


def backward_twice(out: Tensor, x: Tensor) -> Any:
    square(out).backward(retain_graph=True)
    square(out).backward()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda out, x: grad(square(out), x, create_graph=True), "create_graph"),
        (lambda out, x: grad(square(out), x), r"torch\.autograd\.grad.*loss\.backward"),
        (backward_twice, "one backward for each pipelined forward"),
    ],
)
def test_what_cannot_be_differentiated_is_refused(use: Any, message: str) -> None:
    batch = make_batch()
    batch["x"].requires_grad_()
    engine = one_process_engine(Heads(), partition=CHUNKS)
    with pytest.raises(UnsupportedError, match=message):
        use(engine.forward((), batch)["left"], batch["x"])


def embedded() -> nn.Module:
    """Return layers on nodes by their numbers, some of which no edge and no loss reaches."""

    def forward(net: Any, number: Tensor, edge_index: Tensor) -> Tensor:
        x = net.table(number)
        for conv in net.convs:
            x = conv(x, edge_index)
        return x

    convs = nn.ModuleList(gnn.SAGEConv(D, D) for _ in range(4))
    table = nn.Embedding(N + 4, D, sparse=True)
    return net_of(nn.Module, forward, table=lambda: table, convs=lambda: convs)()


@pytest.mark.parametrize("recompute", [False, True])
def test_sparse_gradients_of_embeddings(recompute: bool) -> None:
    plain, edges = embedded(), make_batch()["edge_index"]
    net = copy.deepcopy(plain)
    engine = one_process_engine(net, partition=CHUNKS, recompute=recompute)
    engine.controls.is_exact = True
    batch = {"number": torch.arange(N) % 17, "edge_index": edges}
    for _ in range(2):  # the second adds to the first
        square(engine.forward((), batch)[:3]).backward()
        square(plain(**batch)[:3]).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.is_sparse == theirs.grad.is_sparse
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense())
    assert not engine.state.is_lost


def test_sparse_gradients_of_several_ranks_are_refused() -> None:
    weight = nn.Parameter(torch.randn(3, D))
    weight.grad = torch.ones(3, D).to_sparse(1)
    with pytest.raises(UnsupportedError, match=r"a sparse gradient of 'w'.*sparse=False"):
        _flatten([("w", weight)])


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(gnn.SAGEConv(D, D) for _ in range(2))
        self.inner = nn.Sequential(nn.Linear(D, D), nn.ReLU())
        self.norm = nn.utils.weight_norm(nn.Linear(D, D))  # by a hook

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.norm(self.inner(conv(x, edge_index))).tanh()
        return x


def hooked_pair() -> tuple[Hooked, Hooked, Batch]:
    """Return two equal networks, and a batch whose features need gradients."""
    plain, net, batch = Hooked(), Hooked(), make_batch()
    net.load_state_dict(plain.state_dict())
    return plain, net, {"x": batch["x"].requires_grad_(), "edge_index": batch["edge_index"]}


def note(seen: list[Any]) -> Callable[..., None]:
    def hook(_: nn.Module, *values: Any) -> None:
        seen.extend(t.detach().clone() for t in tensors_in(values))

    return hook


def run_hooked(net: nn.Module, batch: Batch) -> list[Tensor]:
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
    plain, net, batch = hooked_pair()
    own_batch = copy.deepcopy(batch)
    engine = one_process_engine(net, partition=CHUNKS)
    engine.controls.is_exact = True
    engine.attach()
    torch.testing.assert_close(run_hooked(net, own_batch), run_hooked(plain, batch))


PLACES: dict[str, tuple[str | Callable[..., Any], str]] = {
    "conv": ("convs.1.register_forward_hook", "'convs.1', a SAGEConv"),
    "container": ("inner.register_forward_hook", "'inner', a Sequential"),
    "before": ("inner.0.register_forward_pre_hook", r"'inner\.0'"),
    "backward": ("norm.register_full_backward_hook", "'norm', a Linear"),
    "before backward": ("norm.register_full_backward_pre_hook", "'norm', a Linear"),
    "messages": ("convs.0.register_message_forward_hook", r"'convs\.0', a SAGEConv"),
    "all": (nn.modules.module.register_module_forward_hook, "all modules"),
    "gradient": ("convs.0.lin_l.weight.register_hook", "p.grad is whole"),
    "gradient, afterwards": (
        "inner.0.bias.register_post_accumulate_grad_hook",
        r"'inner\.0\.bias'",
    ),
}


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("name", PLACES)
def test_hooks_on_layers_and_weights_are_refused(name: str) -> None:
    place, message = PLACES[name]
    _, net, batch = hooked_pair()
    engine = one_process_engine(net, partition=CHUNKS)
    register = attrgetter(place)(net) if isinstance(place, str) else place
    handle = register(lambda *_: None)
    try:
        with pytest.raises(UnsupportedError, match=f"no hooks on .*{message}"):
            engine.forward((), batch)
    finally:
        handle.remove()
    engine.forward((), batch)


def test_hooks_on_weights_see_the_gradient_of_one_chunk() -> None:
    plain, net, batch = hooked_pair()
    engine = one_process_engine(net, partition=WHOLE)
    for p in (*plain.parameters(), *net.parameters()):
        p.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    engine.forward((), batch).square().sum().backward()
    plain(**batch).square().sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)

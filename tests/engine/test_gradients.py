"""What a user does with outputs and inputs of the pipelined module: gradients are as plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.steps.gradient_sums import flatten
from tests.helpers.engines import one_process_engine

N, D = 23, 6
CHUNKS = torch.arange(N) % 3

pytestmark = pytest.mark.usefixtures("double")

Batch = dict[str, Tensor]


def make_batch() -> Batch:
    number = torch.arange(56)
    edges = torch.stack([(number * 7 + number // 9) % N, (number * 5 + 1) % N])
    return {"x": torch.randn(N, D), "edge_index": edges, "edge_weight": torch.rand(56)}


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
    (grad,) = torch.autograd.grad(square(out["left"]), out["left"], create_graph=True)
    return square(out["right"]) + square(grad)


def rectified(out: Any, batch: Batch) -> Tensor:
    return (out["left"] * out["right"].relu_()).sum()


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
    "rectified in place": rectified,
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


def test_outputs_that_have_no_gradient_say_so() -> None:
    plain, batch = Heads(), make_batch()
    engine = one_process_engine(copy.deepcopy(plain), partition=CHUNKS)
    found, expected = engine.forward((), batch), plain(**batch)
    for name in ("left", "complex", "integer", "detached", "input"):
        assert found[name].requires_grad == expected[name].requires_grad, name
        assert found[name].dtype == expected[name].dtype


def double_backward(out: Any, batch: Batch) -> Any:
    return torch.autograd.grad(square(out["left"]), batch["x"], create_graph=True)


def without_weights(out: Any, batch: Batch) -> Any:
    return torch.autograd.grad(square(out["left"]), batch["x"])


def backward_twice(out: Any, batch: Batch) -> Any:
    square(out["left"]).backward(retain_graph=True)
    square(out["right"]).backward()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (double_backward, "create_graph"),
        (without_weights, r"torch\.autograd\.grad.*loss\.backward"),
        (backward_twice, "one backward for each pipelined forward"),
    ],
)
def test_what_cannot_be_differentiated_is_refused(use: Any, message: str) -> None:
    batch = make_batch()
    batch["x"].requires_grad_()
    engine = one_process_engine(Heads(), partition=CHUNKS)
    with pytest.raises(UnsupportedError, match=message):
        use(engine.forward((), batch), batch)


def test_a_graph_may_be_retained() -> None:
    engine = one_process_engine(Heads(), partition=CHUNKS)
    square(engine.forward((), make_batch())["left"]).backward(retain_graph=True)
    engine.forward((), make_batch())


class Embedded(nn.Module):
    """Nodes by their numbers, some of which no edge and no loss reaches."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(N + 4, D, sparse=sparse)
        self.convs = nn.ModuleList(gnn.SAGEConv(D, D) for _ in range(4))

    def forward(self, number: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embedding(number)
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return x


@pytest.mark.parametrize("recompute", [False, True])
def test_sparse_gradients_of_embeddings(recompute: bool) -> None:
    plain, edges = Embedded(sparse=True), make_batch()["edge_index"]
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
        pair = [one.grad.coalesce() if one.grad.is_sparse else one.grad for one in (ours, theirs)]
        torch.testing.assert_close(*pair)
    assert not engine._is_lost


def test_sparse_gradients_of_several_ranks_are_refused() -> None:
    weight = nn.Parameter(torch.randn(3, D))
    weight.grad = torch.ones(3, D).to_sparse(1)
    with pytest.raises(UnsupportedError, match=r"a sparse gradient of 'w'.*sparse=False"):
        flatten([("w", weight)])

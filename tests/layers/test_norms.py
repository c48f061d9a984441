"""Norms over all nodes: moved statistics in chunks, and PyG's own where exact."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.layers import check_support
from tests.helpers.engines import one_process_engine
from tests.helpers.orders import order_of_step
from tests.passing.test_convs import assert_same, assert_step, move

N, D, CHANNELS = 22, 4, 200
PARTITION = torch.tensor([0] * 5 + [1] * 11 + [2] * 5 + [3])[torch.arange(N) * 5 % N]
CHUNKS = 4
MAKE: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(D),
    "batch cumulative": lambda: nn.BatchNorm1d(D, momentum=None),
    "batch untracked": lambda: nn.BatchNorm1d(D, track_running_stats=False, affine=False),
    "pyg batch": lambda: gnn.BatchNorm(D, allow_single_element=True),
    "graph": lambda: gnn.GraphNorm(D),
    "graph size": lambda: gnn.GraphSizeNorm(),
    "pair": lambda: gnn.PairNorm(scale=1.5),
    "pair individual": lambda: gnn.PairNorm(scale_individually=True),
    "instance": lambda: gnn.InstanceNorm(D),
    "instance tracked": lambda: gnn.InstanceNorm(D, affine=True, track_running_stats=True),
    "mean subtraction": lambda: gnn.MeanSubtractionNorm(),
    "group": lambda: gnn.DiffGroupNorm(D, groups=3),
    "layer": lambda: gnn.LayerNorm(D),
    "layer plain": lambda: gnn.LayerNorm(D, affine=False),
}
TRACKED = ["batch", "batch cumulative", "pyg batch", "instance tracked", "group"]


class Stack(nn.Module):
    """A norm before message passing and, another one, behind it; the head has no neighbours."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()
        self.conv, self.lin = gnn.SimpleConv(aggr="sum"), nn.Linear(D, D)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(self.lin(x))
        return self.second(torch.tanh(self.conv(x, edge_index)) + x)


def make_stack(name: str) -> Stack:
    torch.manual_seed(1)
    net = Stack(MAKE[name]).double()
    for parameter in net.parameters():
        parameter.data += 0.3 * torch.rand_like(parameter)
    return net


def make_graph() -> tuple[Tensor, Tensor]:
    number = torch.arange(50)
    edge_index = torch.stack([(number * 7 + 1) % (N - 1), (number * 3 + number // 8) % (N - 1)])
    return torch.randn(N, D, dtype=torch.float64) + torch.arange(D), edge_index


class Steps:
    """A stack beside its plain copy, and a graph."""

    def __init__(self, net: Any, **options: Any) -> None:
        self.net = make_stack(net) if isinstance(net, str) else net
        self.plain, self.graph = copy.deepcopy(self.net), make_graph()
        in_chunks = options.get("exact_in_chunks", False)  # and steps are stale all the same
        options["num_stages"] = 1 + in_chunks
        self.engine = one_process_engine(self.net, partition=PARTITION, **options)

    def run(self, number: int, moves: float = 0.0) -> Tensor:
        """Return the outputs of a training step, and move weights then."""
        self.engine.set_step(step_index=number)
        output = self.engine.forward(self.graph, {})
        output.sum().backward()
        if moves:
            self.net.lin.weight.data += moves
        return output.detach()

    def evaluate(self, scale: float = 1.0, *, is_validating: bool = True) -> Tensor:
        x, edge_index = self.graph
        self.net.eval()
        self.engine.set_step(is_validating=is_validating)
        with torch.no_grad():
            return self.engine.forward((scale * x, edge_index), {})

    def expected(self) -> Tensor:
        with torch.no_grad():
            return self.plain(*self.graph)

    def buffers(self) -> dict[str, Tensor]:
        return {key: buffer.clone() for key, buffer in self.net.named_buffers()}


def normalised(norm: nn.Module, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return `x` normalised as if these were the statistics of all rows, in the norms' words."""
    if isinstance(norm, gnn.BatchNorm):
        norm = norm.module
    if isinstance(norm, nn.BatchNorm1d | gnn.InstanceNorm):
        out = (x - mean) / (var + norm.eps).sqrt()
        return out if norm.weight is None else out * norm.weight + norm.bias
    if isinstance(norm, gnn.GraphNorm):
        shift = norm.mean_scale
        square = var + (1 - shift).square() * mean.square()
        return norm.weight * (x - shift * mean) / (square + norm.eps).sqrt() + norm.bias
    if isinstance(norm, gnn.PairNorm):
        out = x - mean
        if norm.scale_individually:
            return norm.scale * out / (norm.eps + out.norm(dim=1, keepdim=True))
        return norm.scale * out / (norm.eps + var.sum()).sqrt()
    if isinstance(norm, gnn.MeanSubtractionNorm):
        return x - mean
    if isinstance(norm, gnn.LayerNorm):
        square = (var + mean.square()).mean() - mean.mean().square()
        out = (x - mean.mean()) / (square.sqrt() + norm.eps)
        return out if norm.weight is None else out * norm.weight + norm.bias
    assert isinstance(norm, gnn.GraphSizeNorm)
    return x / N**0.5


class Oracle:
    """The stack on all rows; each chunk's norms see all rows moved as those that have run."""

    def __init__(self, net: Stack) -> None:
        self.net = net
        self.seen: dict[str, Tensor] = {}

    def exact(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Run plain PyG and remember."""
        hooks = []
        for name in ("first", "second", "conv"):
            layer = getattr(self.net, name)
            inner = layer.norm if isinstance(layer, gnn.DiffGroupNorm) else layer
            hooks.append(inner.register_forward_pre_hook(functools.partial(self.see, name)))
        out = self.net(x, edge_index)
        for hook in hooks:
            hook.remove()
        return out

    def see(self, name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.seen[name] = args[0].detach()

    def chunked(self, x: Tensor, edge_index: Tensor, order: Sequence[int]) -> Tensor:
        """Run stale."""
        turn = torch.tensor(order).argsort()[PARTITION]
        fresh = self._norm("first", self.net.lin(x), turn)
        source, target = edge_index
        is_fresh = (turn[source] <= turn[target]).unsqueeze(1)
        messages = torch.where(is_fresh, fresh[source], self.seen["conv"][source])
        summed = torch.zeros_like(fresh).index_add(0, target, messages)
        self.seen["conv"] = fresh.detach()
        return self._norm("second", torch.tanh(summed) + fresh, turn)

    def _norm(self, name: str, x: Tensor, turn: Tensor) -> Tensor:
        norm, then = getattr(self.net, name), self.seen[name]
        if not isinstance(norm, gnn.DiffGroupNorm):
            self.seen[name] = x.detach()
            return by_chunk(norm, x, then, turn)
        shares = norm.lin(x).softmax(-1)
        rows = (shares.unsqueeze(-1) * x.unsqueeze(1)).flatten(1)
        self.seen[name] = rows.detach()
        groups = by_chunk(norm.norm, rows, then, turn).view(-1, norm.groups, D)
        return x + norm.lamda * groups.sum(1)


def by_chunk(norm: nn.Module, now: Tensor, then: Tensor, turn: Tensor) -> Tensor:
    """Return `now` normalised chunk by chunk, by all rows as they are taken to be.

    `then`: the same rows a step ago. `turn`: when the chunk of each row runs.
    """
    mean, var = then.mean(0), then.var(0, unbiased=False).clamp(min=1e-12)
    out = torch.zeros_like(now)
    for place in range(int(turn.max()) + 1):
        has_run, is_own = turn <= place, turn == place
        added = 32 * (1 - float(has_run.double().mean()))  # rows of the variance of all then

        def variance(rows: Tensor, added: float = added) -> Tensor:
            spread = (rows - rows.mean(0)).square().sum(0) + added * var
            return (spread / len(rows)).clamp(min=1e-12)  # a channel may be constant

        scale = (variance(now[has_run]) / variance(then[has_run])).sqrt()
        moved = now[has_run].mean(0) + scale * (mean - then[has_run].mean(0))
        spread = scale.square() * var
        out = torch.where(is_own.unsqueeze(1), normalised(norm, now, moved, spread), out)
    return out


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("option", ["self_check", "recompute", "exact_in_chunks"])
@pytest.mark.parametrize("name", MAKE)
def test_norm_on_chunks_equals_the_oracle(name: str, option: str) -> None:
    steps = Steps(name, **{option: True})
    net, reference, graph = steps.net, steps.plain, steps.graph
    check_support(net, num_chunks=CHUNKS)
    oracle = Oracle(reference)
    for epoch in range(4):
        order = order_of_step(CHUNKS, epoch + 1, 0)
        expected = oracle.chunked(*graph, order) if epoch else oracle.exact(*graph)
        assert_step(steps.engine, {"x": graph[0], "edge_index": graph[1]}, net, expected, reference)
        move(net, 0.05)
        move(reference, 0.05)


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("name", TRACKED)
def test_running_statistics_are_those_of_full_batch_training(name: str, in_chunks: bool) -> None:
    """Each step counts once, with the mean and the unbiased variance of all rows that it saw."""
    steps = Steps(name, exact_in_chunks=in_chunks)
    for number in range(4):  # nothing moves, so stale and whole are the same
        steps.run(number)
        steps.expected()
    assert_same(steps.buffers(), dict(steps.plain.named_buffers()))
    steps.plain.eval()
    assert_same(steps.evaluate(is_validating=False), steps.expected())


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("name", TRACKED)
def test_validation_replaces_running_statistics_after_pipelined_steps(
    name: str, in_chunks: bool
) -> None:
    """Each norm then has those of the rows that an exact pass gives it, behind the norms before."""
    steps = Steps(name, exact_in_chunks=in_chunks)
    for number in range(3):
        steps.run(number, moves=0.1)
    steps.plain.load_state_dict(steps.net.state_dict())

    def replace(norm: nn.Module, args: tuple[Tensor]) -> None:
        norm.running_mean.copy_(args[0].mean(0))
        norm.running_var.copy_(args[0].var(0))

    for one in steps.plain.eval().modules():
        if isinstance(one, nn.BatchNorm1d | gnn.InstanceNorm):
            one.register_forward_pre_hook(replace)
    before = steps.buffers()
    steps.evaluate(is_validating=False)
    assert_same(steps.buffers(), before)  # no validation of the Trainer's
    steps.evaluate(2.0)
    assert_same(steps.buffers(), before)  # other inputs than those of training
    assert_same(steps.evaluate(), steps.expected())
    assert_same(steps.buffers(), dict(steps.plain.named_buffers()))


def test_validation_leaves_running_statistics_of_exact_steps_and_frozen_norms() -> None:
    steps = Steps("batch")
    for number in range(2):
        steps.net.train()
        steps.net.first.eval()
        steps.run(number)
        before = steps.buffers()
        steps.evaluate()
        assert_same(steps.net.first.running_mean, before["first.running_mean"])
        is_same = torch.equal(steps.net.second.running_mean, before["second.running_mean"])
        assert is_same == (number == 0)


@pytest.mark.parametrize("what", ["a checkpoint", "an exact step"])
def test_validation_replaces_running_statistics_after(what: str) -> None:
    steps = Steps("batch")
    for number in range(4):
        steps.engine.controls.is_exact = what == "an exact step" and number == 3
        steps.run(number, moves=0.1)
    if what == "a checkpoint":
        steps.engine.stage_states()
        assert steps.engine.run_state().stale_norms == ("first", "second")
    steps.evaluate()
    mean = steps.net.lin(steps.graph[0]).mean(0).detach()
    assert_same(steps.net.first.running_mean, mean)
    assert steps.engine.run_state().stale_norms == ()


def test_validation_leaves_norms_that_are_frozen_later_or_called_twice() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.first(self.first(self.lin(x)) ** 2)
            return self.second(self.conv(x, edge_index))

    steps = Steps(Twice(MAKE["batch"]).double())
    for number in range(3):
        steps.run(number)
    steps.net.second.track_running_stats = False
    before = steps.buffers()
    steps.evaluate()
    assert_same(steps.buffers(), before)


def test_running_statistics_that_nothing_has_replaced_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once: as validation is given other inputs, or as training ends without it."""
    steps = Steps("batch")
    for number in range(2):
        steps.engine.statistics.warn()
        assert not caplog.records  # the first step is exact
        steps.run(number)
    steps.evaluate(2.0)
    assert not caplog.records  # another validation batch may have the inputs of training
    steps.engine.statistics.warn()
    assert "The running statistics of 'first' and other norms come from pipelined" in caplog.text
    steps.engine.statistics.warn()
    assert len(caplog.records) == 1


def test_channels_that_die_or_are_the_same_in_all_rows_stay_finite() -> None:
    """Sums in single precision give variances of a little less than nothing."""

    class Dying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.linspace(0.1, 5.0, CHANNELS))
            self.norm, self.conv = nn.BatchNorm1d(CHANNELS), gnn.SimpleConv(aggr="mean")

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(self.norm((x + self.shift).relu()), edge_index)

    _, edge_index = make_graph()
    x = torch.randn(N, CHANNELS) * (torch.arange(CHANNELS) % 2)
    net = Dying()
    engine = one_process_engine(net, partition=PARTITION)
    for step in range(4):
        engine.set_step(step_index=step)
        found = engine.forward((x, edge_index), {})
        found.square().sum().backward()
        assert found.isfinite().all()
        assert found[:, ::2].abs().max() < 0.1
        assert net.shift.grad is not None
        assert net.shift.grad.isfinite().all()
        net.shift.data[::2] += 0.02  # the same in all rows
        net.shift.data[1::2] -= 4.0 * (step == 1)


def test_a_refresh_renews_statistics_and_leaves_running_ones_alone() -> None:
    steps = Steps("batch")
    steps.run(0, moves=0.5)
    tracked = steps.net.first.running_mean.clone()
    with torch.no_grad():
        steps.plain.lin.weight += 0.5
    steps.engine.controls.refreshes = True
    assert_same(steps.run(1), steps.expected())
    mean = steps.plain.lin(steps.graph[0]).mean(0)
    assert_same(steps.net.first.running_mean, (0.9 * tracked + 0.1 * mean).detach())


def test_a_frozen_norm_uses_its_running_statistics_and_is_exact_once_when_thawed() -> None:
    """Its statistics do not exist yet."""
    steps = Steps("batch")
    firsts = steps.net.first, steps.plain.first
    for norm in firsts:
        norm.running_mean.fill_(0.5)
    for number, is_training in enumerate([False, False, True, True]):
        for norm in firsts:
            norm.train(is_training)
        assert_same(steps.run(number), steps.expected())
        assert_same(steps.buffers(), dict(steps.plain.named_buffers()))
        assert is_training or float(steps.net.first.running_mean.min()) == 0.5


def test_a_norm_that_lightning_froze_does_not_count() -> None:
    """`BaseFinetuning.freeze` leaves the buffers there and switches tracking off."""
    steps = Steps("batch")
    steps.net.first.track_running_stats = False
    for number in range(3):
        steps.run(number)
    assert int(steps.net.first.num_batches_tracked) == 0
    assert int(steps.net.second.num_batches_tracked) == 3


def test_norms_take_their_arguments_by_name() -> None:
    class Named(Stack):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.first(input=self.lin(x))
            return gnn.GraphNorm.__call__(self.second, x=self.conv(x, edge_index), batch=None)

    net = Named(MAKE["batch"])
    net.second = gnn.GraphNorm(D)
    steps = Steps(net.double())
    for number in range(2):
        assert_same(steps.run(number), steps.expected())


def test_rows_may_change_in_place_once_their_mean_is_subtracted() -> None:
    class InPlace(Stack):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            rows = self.conv(self.lin(x), edge_index)
            normed = self.first(rows)
            rows.mul_(0.5)
            return self.second(normed + rows)

    steps = Steps(InPlace(MAKE["mean subtraction"]).double())
    for number in range(2):
        assert_same(steps.run(number), steps.expected())


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", [n for n in MAKE if n != "pair individual"])
def test_half_precision_by_autocast(name: str) -> None:
    """Chunks give the dtype that the whole graph gives, and nearly the same numbers."""
    x, edge_index = make_graph()
    net = make_stack(name).float()
    engine = one_process_engine(net, partition=PARTITION)
    for step in range(3):
        engine.set_step(step_index=step)
        with torch.autocast("cpu", torch.bfloat16):
            found = engine.forward((x.float(), edge_index), {})
            expected = net.forward(x.float(), edge_index)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
        found.float().sum().backward()


def test_a_batch_vector_of_another_name_is_refused() -> None:
    """By the name 'batch' it would make a batch of graphs of them."""

    class Batched(Stack):
        def forward(self, x: Tensor, edge_index: Tensor, groups: Tensor) -> Tensor:
            return self.first(self.conv(self.lin(x), edge_index), groups)

    steps = Steps(Batched(MAKE["graph"]).double())
    with pytest.raises(UnsupportedError, match="'first', a GraphNorm"):
        steps.engine.forward((*steps.graph, torch.arange(N) // (N // 2 + 1)), {})


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: gnn.GENConv(D, D),
        lambda: gnn.CGConv(D, batch_norm=True),
        lambda: gnn.EdgeConv(nn.Sequential(nn.Linear(2 * D, D), nn.BatchNorm1d(D))),
    ],
)
def test_norms_inside_of_layers_reach_a_fixed_point(make: Callable[[], nn.Module]) -> None:
    """Also where they normalise messages: every edge belongs to one chunk."""

    torch.manual_seed(0)
    layers = [(make(), "x, edge_index -> x") for _ in range(2)]
    steps = Steps(gnn.Sequential("x, edge_index", layers).double())
    for number in range(3):
        assert_same(steps.run(number), steps.expected())


class Checkpointed(nn.Module):
    """Rows through a norm, in an activation checkpoint that no trace sees."""

    def __init__(self, *, is_on: bool) -> None:
        super().__init__()
        self.rows = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Tanh())
        self.is_on = is_on

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.rows, x, use_reentrant=True) if self.is_on else self.rows(x)


def test_a_norm_in_a_checkpoint_runs_once() -> None:
    """Backward would run it again, on a chunk's own statistics."""
    found = []
    for is_on in (False, True):
        torch.manual_seed(1)
        parts = [gnn.GINConv(Checkpointed(is_on=is_on)) for _ in range(2)]
        first = nn.Linear(D, D), "x -> x"  # PyTorch: no input with gradients, no gradients
        net = gnn.Sequential("x, e", [first, *((one, "x, e -> x") for one in parts)]).double()
        steps = Steps(net, exact_in_chunks=True)
        for number in range(2):
            steps.run(number)
        found.append([p.grad for p in net.parameters()] + list(net.buffers()))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)

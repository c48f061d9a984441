"""A draw of a seed: any network, any graph, and a few habits that go together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from tests.differential import habits_of_nets as nets
from tests.differential import habits_of_training as training
from tests.differential.graphs import GraphDraw, draw_graph
from tests.differential.nets import NetDraw, call_arguments, draw_net
from tests.differential.program import Draw, Habit

KINDS = (
    nets.INPUTS,
    nets.READS,
    nets.HOOKS,
    nets.COPIES,
    training.OUTPUTS,
    training.TORCH_HOOKS,
    training.WHOLE,
    training.SETTINGS,
)
HABITS = tuple(habit for kind in KINDS for habit in kind)


def draw_of(seed: int) -> Draw:
    """Return the draw of a seed.

    Habits go by turns, so that each comes once in as many draws as there are, whatever the
    others are.
    """
    random = Random(seed)
    graph = draw_graph(random)
    net = draw_net(random, graph)
    first = HABITS[seed % len(HABITS)]
    while not _fits(net, graph, (first,)):
        graph = replace(graph, weights=False, attributes=False)
        net = draw_net(random, graph)
    habits = (first,)
    for _ in range(random.choice([0, 1, 2, 3])):
        more = (*habits, random.choice(random.choice(KINDS)))
        if _fits(net, graph, more):
            habits = more
    return Draw(seed, net, graph, habits)


def smaller(draw: Draw) -> Iterator[Draw]:
    """Yield draws that have less of something: what fails in one of them is easier to read."""
    for habit in draw.habits:
        yield replace(draw, habits=tuple(one for one in draw.habits if one is not habit))
    net, plain = draw.net, GraphDraw()
    simple = [
        replace(net, layers=net.layers[:2]),
        replace(net, layers=("GCN", "GCN"), is_loop=True),
        replace(net, layers=(net.layers[0],) * 2, is_loop=True),
        replace(net, norm="none"),
        replace(net, skip="none"),
        replace(net, jump=""),
        replace(net, dropout=0.0),
        replace(net, act="torch.tanh"),
    ]
    graph = replace(plain, weights=draw.graph.weights, attributes=draw.graph.attributes)
    others = [*(replace(draw, net=one) for one in simple)]
    others += [replace(draw, graph=one) for one in (plain, graph)]
    for other in others:
        needs_edges = "data.edge_attr" in call_arguments(other.net, other.graph)
        is_given = other.graph.attributes or not needs_edges
        if other != draw and is_given and _fits(other.net, other.graph, other.habits):
            yield other


def _fits(net: NetDraw, graph: GraphDraw, habits: tuple[Habit, ...]) -> bool:
    """Whether these habits go together, and with the network."""
    groups = [habit.group for habit in habits if habit.group]
    names = [habit.name for habit in habits]
    has = set(net.has)
    if call_arguments(net, graph) == "x, edge_index":
        has.add("edges alone")
    if "output" not in groups:
        has.add("plain out")
    is_alone = len(groups) == len(set(groups)) and len(names) == len(set(names))
    return is_alone and all(habit.needs <= has for habit in habits)

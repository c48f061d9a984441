"""A draw of a seed: any network, any graph, and a few habits that go together."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.differential.habits import HABITS, KINDS
from tests.differential.nets import GraphDraw, NetDraw, call_arguments, draw_graph, draw_net
from tests.differential.program import Draw, Habit


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


def _fits(net: NetDraw, graph: GraphDraw, habits: tuple[Habit, ...]) -> bool:
    """Whether these habits go together, and with the network."""
    groups = [habit.group for habit in habits if habit.group]
    names = [habit.name for habit in habits]
    has = net.has
    if call_arguments(net, graph) == "x, edge_index":
        has.add("edges alone")
    if "output" not in groups:
        has.add("plain out")
    is_alone = len(groups) == len(set(groups)) and len(names) == len(set(names))
    return is_alone and all(habit.needs <= has for habit in habits)

"""From the user's module to stages: trace, cut into layers, deal the layers out."""

from __future__ import annotations

from lightning_gnnpipe.stages.balance import (
    check_counts,
    check_num_stages,
    check_num_virtual,
    solve_balance,
)
from lightning_gnnpipe.stages.call import Call, take_apart
from lightning_gnnpipe.stages.cut import cut_module
from lightning_gnnpipe.stages.find import find_pipelined
from lightning_gnnpipe.stages.graph_batch import GraphBatch, Kind
from lightning_gnnpipe.stages.graph_rows import GraphRows
from lightning_gnnpipe.stages.graphs import KnownKinds, classify, find_graphs
from lightning_gnnpipe.stages.husk import Shape, fill_husks, make_husks
from lightning_gnnpipe.stages.kinds import Inputs
from lightning_gnnpipe.stages.layers import Layers, cut_layers
from lightning_gnnpipe.stages.listed import is_listed
from lightning_gnnpipe.stages.reach import find_reached
from lightning_gnnpipe.stages.reads import Reads
from lightning_gnnpipe.stages.repeat import choose_repeated, find_repeatable, tied_bytes
from lightning_gnnpipe.stages.segments import Segment, part_of
from lightning_gnnpipe.stages.split import (
    Stage,
    choose_held,
    find_users,
    repeat_costs,
    split_layers,
)
from lightning_gnnpipe.stages.trace import (
    NUM_GRAPHS,
    is_traced_through,
    line_of_node,
    strip_root,
    trace,
)
from lightning_gnnpipe.stages.values import (
    Sample,
    Value,
    draw_sample,
    learn_values,
    restore_buffers,
    undisturbed,
)

__all__ = [
    "NUM_GRAPHS",
    "Call",
    "GraphBatch",
    "GraphRows",
    "Inputs",
    "Kind",
    "KnownKinds",
    "Layers",
    "Reads",
    "Sample",
    "Segment",
    "Shape",
    "Stage",
    "Value",
    "check_counts",
    "check_num_stages",
    "check_num_virtual",
    "choose_held",
    "choose_repeated",
    "classify",
    "cut_layers",
    "cut_module",
    "draw_sample",
    "fill_husks",
    "find_graphs",
    "find_pipelined",
    "find_reached",
    "find_repeatable",
    "find_users",
    "is_listed",
    "is_traced_through",
    "learn_values",
    "line_of_node",
    "make_husks",
    "part_of",
    "repeat_costs",
    "restore_buffers",
    "solve_balance",
    "split_layers",
    "strip_root",
    "take_apart",
    "tied_bytes",
    "trace",
    "undisturbed",
]

"""Trace the user's module, cut it into layers, and assign layers to stages."""

from lightning_gnnpipe.stages.attributes import (
    OF_LIBRARY,
    OF_USERS,
    RATE,
    Guard,
    HeldTensors,
    State,
    restore_buffers,
    restored_on_errors,
    undisturbed,
)
from lightning_gnnpipe.stages.cut import cut_module
from lightning_gnnpipe.stages.find import (
    as_written,
    find_pipelined,
    is_listed,
    is_traced_through,
    refuse_uncalled,
    switched,
)
from lightning_gnnpipe.stages.layers import Layers, cut_layers
from lightning_gnnpipe.stages.repeat import choose_repeated, tied_bytes
from lightning_gnnpipe.stages.segments import Segment, leaves_of, part_of
from lightning_gnnpipe.stages.shapes import line_of_node, needs_grad, place_of
from lightning_gnnpipe.stages.split import (
    Stage,
    check_counts,
    check_num_stages,
    find_reached,
    find_users,
    ids_in_stages,
    names_of_head,
    repeat_costs,
    solve_balance,
    split_layers,
)
from lightning_gnnpipe.stages.trace import NUM_GRAPHS, most_layers, strip_root, trace
from lightning_gnnpipe.stages.values import (
    Sample,
    SampleRun,
    Value,
    draw_sample,
    draw_samples,
    whole_sample,
)

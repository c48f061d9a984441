"""Predicts the most memory that a rank takes, and chooses what makes it fit into `memory_gib`.

    always       weights, outputs; the graph, its plan and matrices, if they are not in files
    exact        histories, all activations; or inputs of layers, with `recompute`
    in chunks    histories and their gradients, inputs of layers
    pipelined    histories and their gradients, all activations; or one chunk's
    evaluation   histories and their gradients, what later layers read

Beside these one layer runs: on all nodes, or on a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_gnnpipe.chunks.costs import LayerCost, StepCosts
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.options import RunOptions, StrategyOptions
from lightning_gnnpipe.stages import Layers, Stage, find_users, split_layers
from lightning_gnnpipe.types import Weights

GIB = 2**30
_TRAINED = 4  # a weight, its gradient, two optimizer states
_OUTPUTS = 4  # the outputs, their gradient, and as much again in the loss
_PLAN, _ENDS, _VALUE = 24, 16, 4  # bytes of an edge
_CUTTING, _MAKING = 100, 60  # while the graph is cut, or its matrices alone are made
_SPARE = 1.05  # what the allocator loses, and the user's step keeps

Setting = tuple[StrategyOptions, int]  # and the number of chunks


def weight_bytes(
    root: nn.Module, module: nn.Module, stages: Sequence[Stage], weights: Weights
) -> list[int]:
    """Return the bytes of weights, their gradients and optimizer states on a rank of each stage.

    `module`: is pipelined, a part of `root`.
    """
    named = dict(module.named_parameters())
    inner = set(map(id, named.values()))
    outer = sum(_trained_bytes(p) for p in root.parameters() if id(p) not in inner)
    if weights == "whole":
        return [outer + sum(map(_trained_bytes, named.values()))] * len(stages)
    users = find_users(stages, module).items()
    held = ([named[n] for n, by in users if n in named and one.index in by] for one in stages)
    return [outer + sum(map(_trained_bytes, own)) for own in held]


def _trained_bytes(weight: nn.Parameter) -> int:
    return weight.nbytes * (_TRAINED if weight.requires_grad else 1)


def predict_peaks(
    weights: Sequence[int],
    stages: Sequence[Stage],
    costs: StepCosts,
    setting: Setting,
    node_frac: float = 1.0,
    row_frac: float = 1.0,
) -> list[int]:
    """Return the bytes of a rank of each stage at its peak, beside Python and its libraries.

    `weights`: see `weight_bytes`. `node_frac`, `row_frac`: the shares of nodes, and of rows of
    histories, of its shard.
    """
    (options, num_chunks), sizes, found = setting, costs.sizes, []
    is_cut, in_memory = num_chunks > 1, options.table_folder is None
    is_piped = is_cut and not (options.exact_in_chunks and len(stages) == 1)
    frac, share = max(node_frac, row_frac), costs.largest / num_chunks
    row_frac *= is_piped

    def bytes_of(names: Iterable[str]) -> float:
        return node_frac * sum(sizes.values.get(name, 0) for name in names)

    for stage, weight in zip(stages, weights, strict=True):
        own = costs.of(stage)
        saved = [node_frac * one.saved_bytes for one in own]
        tables = row_frac * in_memory * sum(_table_bytes(one, options) for one in own)
        running = [frac * max(one.running_bytes, one.saved_bytes) for one in own]
        more = max(most - kept for most, kept in zip(running, saved, strict=True))
        rows = tables / 2  # gradients come later
        kept, ahead = _reads(stage, bytes_of)
        again = zip(kept, running, strict=False)  # of layers; parts of earlier ones follow
        exact = rows + (max(map(sum, again)) if options.recompute else sum(saved) + more)
        alone = (frac * one.evaluated_bytes for one in own)
        evaluated = tables + max(map(sum, zip(ahead, alone, strict=False)))
        if options.exact_in_chunks and is_cut:  # rows that layers exchange, and their gradients
            read = {n for one in stage.computed for n in one.inputs if n not in stage.leaves}
            largest = max((bytes_of([name]) for name in (*read, *stage.sent)), default=0.0)
            entries = node_frac * sizes.num_nodes * _VALUE * max(sum(one.pushed) for one in own)
            ends, of_chunk = 2 * in_memory * max(largest, entries), share * max(running)
            exact = tables + in_memory * bytes_of(read) + ends + of_chunk
            evaluated = tables + 2 * ends + of_chunk
        at_once = sum(saved) * (share if options.recompute else 1)
        pipelined = (tables + at_once + more * share) * is_piped
        held = 1.0 * weight + bytes_of([*stage.received, *stage.sent])
        held += _OUTPUTS * bytes_of(stages[-1].sent)
        held += edge_bytes(options, costs, is_cut, node_frac) * sizes.num_edges
        held += sizes.given_bytes
        cutting = sizes.given_bytes + (_MAKING if sizes.is_mapped else _CUTTING) * sizes.num_edges
        if not sizes.is_mapped:
            held += bytes_of(stage.leaves)
        found.append(round(_SPARE * max(held + max(exact, pipelined, evaluated), cutting)))
    return found


def _reads(
    stage: Stage, bytes_of: Callable[[Iterable[str]], float]
) -> tuple[list[float], list[float]]:
    """Return for each layer what lives beside it: in backward with `recompute`, in evaluation.

    In backward: inputs of this layer and of earlier ones, and gradients that wait for earlier ones.
    In evaluation: what this layer and later ones read.
    """
    read = [set(one.inputs) - stage.leaves for one in stage.segments]
    made = [set(one.outputs) for one in stage.segments]
    kept, ahead = list[float](), list[float]()
    for i in range(len(read)):
        so_far, later = set().union(*read[: i + 1]), set().union(*read[i + 1 :])
        kept.append(bytes_of(so_far) + bytes_of(so_far & later))
        ahead.append(bytes_of((read[i] | later) - set().union(*made[i:])))
    return kept, ahead


def edge_bytes(
    options: StrategyOptions, costs: StepCosts, is_cut: bool, node_frac: float = 1.0
) -> float:
    """Return the bytes of an edge: in the plan, in matrices, and in the layers' own edges."""
    sizes, edges = costs.sizes, costs.edges
    num_copies = 1 + (is_cut and not options.exact_in_chunks)  # of the chunks, of the whole
    in_matrices = edges.matrices + edges.ends * num_copies + edges.results * is_cut
    if edges.matrices and is_cut:  # values of other scale and dtype, indices within chunks
        in_matrices += _VALUE * (1 + (options.histories.dtype is torch.bfloat16))
    in_plan = _PLAN + _ENDS * is_cut
    are_files = sizes.is_on_host and options.table_folder is not None
    return in_plan * (not sizes.is_mapped) + node_frac * in_matrices * (not are_files)


def _table_bytes(cost: LayerCost, options: StrategyOptions) -> float:
    """Return the bytes of a layer's rows and gradients; weighted sums round both, and keep none."""
    is_rounded = options.histories.dtype is torch.bfloat16 and not cost.is_rounded
    rows = cost.history_bytes / 2 * (0.5 if is_rounded else 1)
    if cost.is_sum:
        return 2 * rows
    return rows * (1 + options.recompute) + cost.history_bytes / 2


def settings_of(run: RunOptions, stages: Sequence[Stage], costs: StepCosts) -> list[Setting]:
    """Return what a run may be set to: by the price of what saves memory, then of the chunks."""
    num_nodes = costs.sizes.num_nodes
    numbers = [run.count_chunks(num_nodes)]
    if run.measures_chunks(len(costs.layers)):
        times, best = costs.times(stages, num_nodes), costs.choose_num_chunks(stages, num_nodes)
        numbers = sorted(times, key=lambda number: (number != best, times[number]))
    return [(options, number) for options in run.given.savings() for number in numbers]


def choose_setting(
    settings: Iterable[Setting], predict: Callable[[Setting], Sequence[int]], most_bytes: float
) -> tuple[Setting, int]:
    """Return the first setting that fits, and its bytes; if none does, the one with the fewest."""
    found = list[tuple[Setting, int]]()
    for setting in settings:
        found.append((setting, max(predict(setting))))
        if found[-1][1] <= most_bytes:
            return found[-1]
    return min(found, key=lambda one: one[1])


def fit_memory(
    root: nn.Module,
    module: nn.Module,
    layers: Layers,
    counts: Sequence[int],
    repeated: Collection[str],
    costs: StepCosts,
    run: RunOptions,
) -> tuple[Setting, str]:
    """Return the setting with which a run fits into its memory, and what to say.

    Raises:
        ConfigError: If nothing fits.
    """
    gib = run.given.memory_gib or 0.0

    def choose(counts: Sequence[int], **more: Any) -> tuple[Setting, float]:
        stages, given = split_layers(layers, counts, repeated), replace(run.given, **more)
        settings = settings_of(replace(run, num_stages=len(counts), given=given), stages, costs)
        weights = weight_bytes(root, module, stages, run.given.weights)
        predict = partial(predict_peaks, weights, stages, costs)
        setting, num_bytes = choose_setting(settings, predict, gib * GIB)
        return setting, num_bytes / GIB

    setting, needed = choose(counts)
    saved = setting[0].saved_beside(run.given)
    text = "".join(f", {name}={value!r}" for name, value in saved.items())
    if needed <= gib:
        return setting, f"Memory: {needed:.3g} of {gib:g} GiB{text and f' with{text[1:]}'}."
    more = range(len(counts) + 1, len(layers.segments) + 1)
    tries = ((n, choose(costs.assign_layers(layers, n, repeated))[1]) for n in more)
    fitting = next((f"or Trainer(devices={n}), {b:.3g} GiB each" for n, b in tries if b <= gib), "")
    with suppress(ConfigError):  # another option forbids files
        on_disk = choose(counts, table_folder="FOLDER")[1]
        if not fitting and on_disk < needed:
            fitting = f"or table_folder='FOLDER' on a disk, {on_disk:.3g} GiB"
    raise ConfigError(
        f"Training does not fit into memory_gib={gib:g}: it would take {needed:.3g} GiB.\n"
        f"That is the least, with num_chunks={setting[1]}{text}.\n"
        f"Write memory_gib={1.01 * needed:.3g}, {fitting or 'since more stages do not suffice'}."
    )

"""Results of a forecast: cuts, times, bytes and memory of a training step, and advice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_gnnpipe.chunks import LayerCost, uses_glibc_malloc
from lightning_gnnpipe.planning.closed_forms import Link
from lightning_gnnpipe.report import (
    CLOSE,
    TIMED_ALONE,
    align,
    compare_times,
    compare_weights,
    shorten,
)
from lightning_gnnpipe.types import Weights

_MIB = 2**20
_PLAIN = "a plain Trainer"


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage, in a training step over all nodes.

    Attributes:
        first_layer: Index of its first layer, from 0.
        num_layers: Message-passing layers.
        num_parameters: Entries of its weights, shared ones included.
        compute_s: Seconds, forward and backward, of all its shards, repeated layers included.
        memory_bytes: Of its largest shard, at its peak: graph, weights and optimizer states,
            activations, histories. Python and its libraries are not counted.
    """

    first_layer: int
    num_layers: int
    num_parameters: int
    compute_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """A training step on stages of `num_shards` shards each.

    Attributes:
        stages: Forecast of each stage.
        num_shards: Shards of the graph, G: ranks of each stage.
        num_chunks: Chunks, K.
        step_s: Predicted seconds, without loss, metrics and optimizer, which every rank computes.
            Ranks that share a memory's bandwidth are slower.
        bubble_frac: Share of all ranks' time, forward and backward, in which they do not compute.
        step_bytes: Bytes sent in a step, without statistics of norms.
        bytes_by_weights: `step_bytes` with each value of the strategy's `weights`.
        memory_bytes: Of the largest rank, at its peak.
        fits: Whether `memory_bytes` is within the limit; True without one.
        saved: Options chosen so that it fits, such as `recompute`.
    """

    stages: tuple[StageForecast, ...]
    num_shards: int
    num_chunks: int
    step_s: float
    bubble_frac: float
    step_bytes: int
    bytes_by_weights: Mapping[Weights, int]
    memory_bytes: int
    fits: bool
    saved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        """Stages, S."""
        return len(self.stages)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of stages, shards and chunks."""
        return self.num_stages, self.num_shards, self.num_chunks

    @property
    def options(self) -> str:
        """The strategy for this layout, as it is written."""
        return write_layout(*self.sizes, **self.saved)

    def __str__(self) -> str:
        shards = f"{self.num_shards} shards"
        if self.num_stages > 1:
            name = f"pipeline, {self.num_stages} stages"
            name += f" x {shards}" if self.num_shards > 1 else ""
        else:
            name = f"graph parallel, {shards}" if self.num_shards > 1 else "one device"
        return f"{name}, {self.num_chunks} chunk{'s' if self.num_chunks > 1 else ''}"


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How a model and a graph would be cut, and what a training step would take.

    Attributes:
        layout: Forecast of the layout asked for, else of the fastest that fits.
        layouts: Forecasts of one device with one chunk, and of all layouts of the devices: graph
            parallelism with one chunk, and several stages, in as many chunks as training takes.
        num_nodes: Nodes, N.
        num_edges: Edges, E.
        layer_names: Names of the message-passing layers.
        layer_costs: Costs of each layer in a step.
        chunk_rows: Nodes of each chunk.
        chunk_edges: Edges that end in each chunk.
        halo_rows: Nodes of other chunks that each chunk reads.
        edge_cut_frac: Share of the edges between two chunks.
        link: Link speed, and seconds of a message of any size, that are assumed.
        chunk_times: By number of chunks, seconds of computing a step on several stages, of all
            shards together. The first is the plan's own number.
        by_all_cores: Seconds of a step on one device with one chunk and a thread a core; 0 if the
            layouts have such threads, or it was not measured.
        by_pyg: Seconds of a step of the layers as PyG computes them in a plain Trainer, with a
            thread a core. 0 if not measured: the graph has more than a million nodes and edges, the
            edges are a sparse matrix, layers keep caches, options bound the memory, or the process
            is a fork.
    """

    layout: LayoutForecast
    layouts: tuple[LayoutForecast, ...]
    num_nodes: int
    num_edges: int
    layer_names: tuple[str, ...]
    layer_costs: tuple[LayerCost, ...]
    chunk_rows: tuple[int, ...]
    chunk_edges: tuple[int, ...]
    halo_rows: tuple[int, ...]
    edge_cut_frac: float
    link: Link
    chunk_times: Mapping[int, float]
    by_all_cores: float = 0.0
    by_pyg: float = 0.0

    @property
    def best(self) -> LayoutForecast:
        """The layout to take, of `layouts`: the fastest, or one device if it may be as fast.

        If none fits, the one with the least memory. One device stands for a plain Trainer, too.
        """
        fastest = choose_layout(self.layouts)
        if not fastest.fits:
            return fastest
        taken = (one for one in self.layouts if one.options == self._taken)
        return next(taken, self.layouts[0])

    @property
    def advice(self) -> tuple[str, ...]:
        """What to take, and what speaks against the plan."""
        best, own, advice = self.best, self.layout, []
        if not best.fits:
            least = f"{best.memory_bytes / _MIB:,.0f} MiB, with {best.options}"
            advice.append(f"No layout fits into the memory. Use more devices: {least}.")
        else:
            advice += self._rank_times()
            advice.append(TIMED_ALONE)
        if self.by_all_cores > 1.2 * self.layouts[0].step_s:
            advice.append("A thread a core took longer than one: the machine was busy. Plan again.")
        if own.step_bytes > min(own.bytes_by_weights.values()):
            advice.append(compare_weights(own.bytes_by_weights))
        if self.chunk_times:
            advice.append(compare_times(self.chunk_times, own.num_shards))
        return tuple(advice)

    @property
    def _is_alone_known(self) -> bool:
        """Whether one device with a thread a core was timed, and fits."""
        return self.by_all_cores > 0 and self.layouts[0].fits

    @property
    def _seconds(self) -> dict[str, float]:
        """Seconds of a step by what is to be written, of what fits, and of a plain Trainer."""
        found = {one.options: one.step_s for one in self.layouts if one.fits}
        if self._is_alone_known:
            found[self._all_cores] = self.by_all_cores
        if self.by_pyg:
            found[_PLAIN] = self.by_pyg
        return found

    @property
    def _all_cores(self) -> str:
        return f"{self.layouts[0].options} with a thread a core"

    @property
    def _taken(self) -> str:
        """What to take: the fastest, or what runs on one device if it may be as fast."""
        found, alone = self._seconds, (_PLAIN, self.layouts[0].options, self._all_cores)
        least = min(found, key=found.__getitem__)
        close = [one for one in alone if found.get(one, math.inf) <= CLOSE * found[least]]
        return least if least in alone or not close else min(close, key=found.__getitem__)

    def _rank_times(self) -> Iterator[str]:
        """Yield what to take, and what is as fast as far as a forecast can tell."""
        found, taken = self._seconds, self._taken
        least_s = min(found.values())
        if found[taken] == least_s:
            yield f"Fastest: {taken}, {least_s:.3f} s per step."
        else:
            yield f"Take {taken}, {found[taken]:.3f} s per step: it starts sooner, and is exact."
        close = [one for one, step_s in found.items() if step_s <= CLOSE * least_s]
        if len(close) > 1:
            rest = " and ".join(f"{one}, {found[one]:.3f} s," for one in close if one != taken)
            yield f"{rest} may take as long: forecasts are not as exact as that difference."

    def __str__(self) -> str:
        return "\n".join([*self._cut_lines(), *self._step_lines(), *self.advice])

    def _cut_lines(self) -> list[str]:
        rows, halo, stages = self.chunk_rows, sum(self.halo_rows), self.layout.stages
        chunks = "1 chunk"
        if len(rows) > 1:
            chunks = (
                f"{len(rows)} chunks of {min(rows):,} to {max(rows):,} nodes, which read {halo:,} "
                f"nodes of other chunks; {self.edge_cut_frac:.1%} of the edges are between chunks"
            )
        lines = [
            f"{self.num_nodes:,} nodes, {self.num_edges:,} edges in {chunks}",
            f"Layers in stages: {len(self.layer_names)} in {len(stages)}",
        ]
        for number, stage in enumerate(stages):
            names = self.layer_names[stage.first_layer :][: stage.num_layers]
            lines.append(
                f"stage {number}: {shorten(names)}, {stage.num_parameters:,} parameters, "
                f"{stage.compute_s * 1e3:,.0f} ms, {stage.memory_bytes / _MIB:,.0f} MiB"
            )
        return lines

    def _step_lines(self) -> list[str]:
        """Return one line a layout; that of the plan is in brackets, the one to take has a star."""
        rows = [("", "seconds", "bytes", "idle", "MiB")]
        taken = self._taken if self.best.fits else self.best.options
        if self.by_pyg:
            mark = "* " if taken == _PLAIN else "  "
            rows.append((mark + _PLAIN, f"{self.by_pyg:.3f}", "0", "0.0%", "-"))
        for one in self.layouts:
            name = f"[{one}]" if one is self.layout else str(one)
            memory = f"{one.memory_bytes / _MIB:,.1f}" + ("" if one.fits else " (too much)")
            idle = f"{one.bubble_frac:.1%}"
            mark = "* " if one.options == taken else "  "
            rows.append((mark + name, f"{one.step_s:.3f}", f"{one.step_bytes:,}", idle, memory))
            if one is self.layouts[0] and self._is_alone_known:
                mark = "* " if taken == self._all_cores else "  "
                shown = f"{self.by_all_cores:.3f}"
                rows.append((mark + "the same, a thread a core", shown, "0", "0.0%", memory))
        is_slow = uses_glibc_malloc() and self.by_pyg > 0
        malloc = ", and may take less with tcmalloc" if is_slow else ""
        return [
            f"A training step without loss, optimizer and validation, with links of {self.link}. "
            "*: what to take; [ ]: the plan above. MiB: of tensors; on CPUs, without memory_gib, "
            "malloc may keep half as much again. On CPUs a plain Trainer has a thread a core"
            f"{malloc}.",
            *align(rows, left=0),
        ]


def write_layout(num_stages: int, num_shards: int, num_chunks: int, **options: Any) -> str:
    """Return the strategy for a layout, as it is written."""
    options |= {"graph_parallel": num_shards} if num_shards > 1 else {}
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    return (
        f"Trainer(devices={num_stages * num_shards}, "
        f"strategy=GNNPipeStrategy(num_chunks={num_chunks}{more}))"
    )


def choose_layout(layouts: tuple[LayoutForecast, ...]) -> LayoutForecast:
    """Return the fastest layout that fits; if none fits, the one with the least memory."""
    fitting = [one for one in layouts if one.fits]
    if not fitting:
        return min(layouts, key=lambda one: one.memory_bytes)
    return min(fitting, key=lambda one: one.step_s)

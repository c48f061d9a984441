"""What each layer costs: seconds, bytes that autograd saves, size of histories."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_gnnpipe.passing import EdgeBytes
from lightning_gnnpipe.stages import Layers, Stage, repeat_costs, solve_balance

_DISTURBED = 3.0  # times; caches save less
_OF_GCN = EdgeBytes(20, 16, 0)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer in a training step over all nodes.

    Attributes:
        saved_bytes: Bytes that autograd keeps between forward and backward, without those that an
            earlier layer keeps as well.
        history_bytes: Bytes of its histories and gradient buffers, with more than one chunk.
        pushed: Entries of one node's row in each of its histories.
        chunk_s: Seconds that one more chunk adds; 0 if not measured.
        is_sum: Whether it sums rows with weights.
        is_rounded: Whether `history_bytes` are of rounded histories.
        running_bytes: The most that lives while it runs, `saved_bytes` included.
        evaluated_bytes: The same without gradients; its outputs included.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    history_bytes: int = 0
    pushed: tuple[int, ...] = ()
    chunk_s: float = 0.0
    is_sum: bool = False
    is_rounded: bool = False
    running_bytes: int = 0
    evaluated_bytes: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds, forward and backward."""
        return self.forward_s + self.backward_s

    def step_s(self, *, recompute: bool = False, in_chunks: bool = False) -> float:
        """Return its seconds in a training step.

        `in_chunks`: of an exact step in chunks. A chunk runs again each time that it waits for rows
        or gradients of other chunks. The factors of layers that exchange once are measured, with
        GCN and GraphSAGE on 10,000 nodes.
        """
        if in_chunks:
            num_waits = max(len(self.pushed), 1)
            return 2 * (num_waits + 1) * self.forward_s + (num_waits + 2) * self.backward_s
        return self.compute_s + recompute * self.forward_s


@dataclass(frozen=True, slots=True)
class InputSizes:
    """A graph; bytes of arguments in memory, and by name of tensors with a row a node or edge.

    `is_mapped`: the plan lies in memory-mapped files. `is_on_host`: the layers compute on the CPU.
    """

    num_nodes: int = 0
    num_edges: int = 0
    given_bytes: int = 0
    values: Mapping[str, int] = field(default_factory=dict)
    is_mapped: bool = False
    is_on_host: bool = True


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a training step over all nodes: of layers, and of recomputing values, by name.

    They are measured in `num_chunks` chunks. `is_disturbed`: no idle machine takes such times.
    `by_all_cores`: of layers on one chunk with a thread a core; `by_pyg`: likewise of layers as
    PyG computes them; empty if not measured. `taken_s`: seconds that a stage spends on receiving a
    chunk. `edges`: by default GCN's. `largest`: the work of the largest chunk, over the mean.
    """

    layers: tuple[LayerCost, ...]
    repeats: dict[str, LayerCost]
    num_chunks: int = 1
    sizes: InputSizes = field(default_factory=InputSizes)
    is_disturbed: bool = False
    by_all_cores: tuple[LayerCost, ...] = ()
    by_pyg: tuple[LayerCost, ...] = ()
    taken_s: float = 0.0
    edges: EdgeBytes = _OF_GCN
    largest: float = 1.0

    @property
    def compute_s(self) -> float:
        """Seconds of all layers, forward and backward."""
        return sum(one.compute_s for one in self.layers)

    def alone_s(self, *, recompute: bool) -> float:
        """Seconds of computing a step on one device with a thread a core; 0 if not measured."""
        return sum(one.step_s(recompute=recompute) for one in self.by_all_cores)

    def of(self, stage: Stage) -> list[LayerCost]:
        """Return the costs of all that `stage` computes."""
        again = [self.repeats[name] for part in stage.repeated for name in part.outputs]
        return [self.layers[segment.index] for segment in stage.segments] + again

    def assign_layers(
        self, layers: Layers, num_stages: int, repeated: Collection[str]
    ) -> tuple[int, ...]:
        """Return the number of layers of each stage that makes the slowest stage fastest."""
        again = {name: cost.compute_s for name, cost in self.repeats.items()}
        costs = [cost.compute_s for cost in self.layers]
        return solve_balance(costs, num_stages, repeat_costs(layers, repeated, again))

    def with_overhead(self, other: StepCosts) -> StepCosts:
        """Return the costs with `chunk_s`, by comparison with costs in another number of chunks.

        A layer takes `a K + b` seconds in K chunks, and neither a nor b is negative. It takes at
        least what it does in one chunk: alone, a small chunk finds its rows in the caches.
        """

        def compare(one: LayerCost, its: LayerCost) -> LayerCost:
            if other.num_chunks == 1 and its.compute_s > one.compute_s:
                return replace(one, forward_s=its.forward_s, backward_s=its.backward_s)
            chunk_s = (its.compute_s - one.compute_s) / (other.num_chunks - self.num_chunks)
            return replace(one, chunk_s=min(max(chunk_s, 0.0), one.compute_s / self.num_chunks))

        layers = tuple(map(compare, self.layers, other.layers))
        repeats = {name: compare(one, other.repeats[name]) for name, one in self.repeats.items()}
        both = ((one.num_chunks, one.compute_s) for one in (self, other))
        (few, few_s), (many, many_s) = sorted(both)
        is_disturbed = few_s > _DISTURBED * many_s or many_s / many > _DISTURBED * few_s / few
        return replace(self, layers=layers, repeats=repeats, is_disturbed=is_disturbed)

    def at(self, num_chunks: int) -> StepCosts:
        """Return the costs in `num_chunks` chunks."""
        more = num_chunks - self.num_chunks

        def scale(one: LayerCost) -> LayerCost:
            by = 1 + more * one.chunk_s / max(one.compute_s, 1e-12)
            return replace(one, forward_s=by * one.forward_s, backward_s=by * one.backward_s)

        repeats = {name: scale(one) for name, one in self.repeats.items()}
        layers = tuple(map(scale, self.layers))
        return replace(self, layers=layers, repeats=repeats, num_chunks=num_chunks)

    def step_s(self, stages: Sequence[Stage], num_chunks: int) -> float:
        """Return the seconds of computing a step on `stages` in `num_chunks` chunks."""
        costs = self.at(num_chunks)
        slowest_s = max(sum(one.compute_s for one in costs.of(stage)) for stage in stages)
        return slowest_s * (num_chunks + len(stages) - 1) / num_chunks

    def times(self, stages: Sequence[Stage], num_nodes: int) -> dict[int, float]:
        """Return `step_s` by the numbers of chunks to choose from: 1 to 16 a stage."""
        numbers = (len(stages) << power for power in range(5))
        possible = [number for number in numbers if number <= num_nodes] or [num_nodes]
        return {number: self.step_s(stages, number) for number in possible}

    def choose_num_chunks(self, stages: Sequence[Stage], num_nodes: int) -> int:
        """Return the number of chunks that is fastest on these stages.

        Of numbers that take at most 5 % longer, the smallest: its embeddings are the least stale.
        """
        taken_s = self.taken_s * (len(stages) > 1)
        times = {n: found + taken_s * n for n, found in self.times(stages, num_nodes).items()}
        return next(n for n in times if times[n] <= 1.05 * min(times.values()))

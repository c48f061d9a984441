"""What is said of a module in stages: their layers, and the bytes and seconds of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import Tensor, nn

from lightning_gnnpipe.calls import Kind
from lightning_gnnpipe.codecs import Codecs
from lightning_gnnpipe.layers import find_convs
from lightning_gnnpipe.stages import Layers, Segment, Stage, ids_in_stages
from lightning_gnnpipe.types import Weights

_MIB = 2**20
CLOSE = 1.3  # forecasts that differ by less tell no difference
# Measured with nine networks on two cores.
TIMED_ALONE = (
    "Layers were timed alone: on CPUs steps take 0.6 to 1.4 times as long, "
    "by graph parallelism up to twice."
)


@dataclass(frozen=True, slots=True)
class Split:
    """A module in stages, each of `num_shards` ranks.

    Attributes:
        users: By name, the stages that use a parameter or buffer of `module`.
        num_rows: Returns the number of nodes, or of edges in an edge set.
    """

    module: nn.Module
    layers: Layers
    stages: Sequence[Stage]
    users: Mapping[str, set[int]]
    num_shards: int
    num_rows: Callable[[Kind, int], int]

    def weights_of(self, stage: Stage) -> list[nn.Parameter]:
        """Return the parameters that `stage` uses."""
        named = self.module.named_parameters()
        return [p for name, p in named if stage.index in self.users.get(name, ())]

    @property
    def output_bytes(self) -> int:
        """Bytes of the module's outputs."""
        values = [self.layers.values[name] for name in self.layers.outputs]
        return sum(self.num_rows(one.kind, one.edge_set) * one.row_bytes for one in values)

    def cut_bytes(self, stage: Stage, codecs: Codecs) -> tuple[int, int]:
        """Return the bytes that `stage` sends to the next one in a step, and that come back."""
        ahead = back = 0
        for one in map(self.layers.values.__getitem__, stage.sent):
            shape = (self.num_rows(one.kind, one.edge_set), *one.row_shape)
            ahead += codecs.rows.payload_bytes(shape, one.dtype)
            back += codecs.grads.payload_bytes(shape, one.dtype) * one.requires_grad
        return ahead, back

    def step_bytes(self, root: nn.Module, codecs: Codecs) -> dict[Weights, int]:
        """Return the bytes sent in a step, by the value of the strategy's `weights`.

        Without halos of shards, and gradients of arguments. `root`: the LightningModule.
        """
        num_ranks = len(self.stages) * self.num_shards
        sent = sum(sum(self.cut_bytes(stage, codecs)) for stage in self.stages[:-1])
        sent += (num_ranks - 1) * self.output_bytes
        own = ids_in_stages(self.module, root, self.users, [self.layers])
        outer = (p for p in root.parameters() if p.requires_grad and id(p) not in own)
        sent += (num_ranks - 1) * _gradient_bytes(outer)  # copies of the first rank's
        named: tuple[Weights, ...] = get_args(Weights)
        return {weights: sent + self._bytes_of_gradients(weights) for weights in named}

    def _bytes_of_gradients(self, weights: Weights) -> int:
        """Return the bytes of gradients of the weights of stages.

        The shards of each stage sum theirs. A gradient of n stages is sent n - 1 times to be
        summed, and the sum goes to all stages that hold the weight: with "staged" to the n.
        """
        num_shards, total = self.num_shards, 0
        for name, p in self.module.named_parameters():
            num_users = len(self.users.get(name, ()))
            if p.requires_grad and num_users:
                num_holders = num_users if weights == "staged" else len(self.stages)
                copies = num_shards * (num_users + num_holders - 2)
                total += _gradient_bytes([p]) * (copies + 2 * num_users * (num_shards - 1))
        return total


def _gradient_bytes(weights: Iterable[Tensor]) -> int:
    """Return the bytes of gradients, each with a number for whether there is one."""
    return sum(one.nbytes + one.element_size() for one in weights)


class LayerNames:
    """Names the message-passing layers of `module` in a segment."""

    def __init__(self, module: nn.Module) -> None:
        self._convs = {id(conv): name for name, conv in find_convs(module).items()}

    def of(self, segment: Segment) -> str:
        """Return the names of the message-passing layers in `segment`, else its number."""
        names = [self._convs[id(m)] for m in segment.module.modules() if id(m) in self._convs]
        return ", ".join(dict.fromkeys(names)) or f"layer {segment.index}"


def describe_split(split: Split, num_chunks: int, *, has_graphs: bool = False) -> str:
    """Return one sentence: stages, the layers of each, shards, chunks."""
    num_stages, piece = len(split.stages), "micro-batch" if has_graphs else "chunk"
    counts = " + ".join(str(len(stage.segments)) for stage in split.stages)
    shards = f", {split.num_shards} shards" if split.num_shards > 1 else ""
    end = "" if num_chunks == 1 else "es" if has_graphs else "s"
    stages = f"{num_stages} stage{'s' if num_stages > 1 else ''} of {counts} layers{shards}"
    return f"Pipeline: {stages}, {num_chunks} {piece}{end}."


def shorten(names: Sequence[str]) -> str:
    """Return the first and the last of `names`, and their number."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def align(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the lines of a table whose column `left` is aligned left, and the rest right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if number == left else str.rjust for number in range(len(widths))]
    padded = (map(lambda pad, *cell: pad(*cell), sides, row, widths) for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


def compare_weights(sent: Mapping[Weights, int]) -> str:
    """Return which value of the strategy's `weights` sends less, of `sent` bytes a step."""
    less, more = sorted(sent, key=lambda one: (sent[one], one != "whole"))
    return (
        f"weights='{less}' sends {sent[less] / _MIB:,.1f} MiB a step, "
        f"'{more}' {sent[more] / _MIB:,.1f} MiB."
    )


def compare_times(times: Mapping[int, float], num_shards: int) -> str:
    """Return seconds of computing a step; `times`: of all shards together by chunks, K first."""
    own, *more = [f"{seconds / num_shards:.3f} s in {n}" for n, seconds in times.items()]
    compared, end = f" ({', '.join(more)})" if more else "", "s" * (next(iter(times)) > 1)
    return f"Computing a step, without sending, takes about {own} chunk{end}{compared}."

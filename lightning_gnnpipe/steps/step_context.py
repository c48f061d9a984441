"""Where the run is, the seeds of a pass, and the comparison of both over the ranks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from lightning_gnnpipe.chunks import SeedOf, make_seeds
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import GraphError, UnsupportedError, explain
from lightning_gnnpipe.graph import ContentNumbers, fold, tensors_in, text_fingerprint
from lightning_gnnpipe.steps.weight_reads import WeightReads

_LOSS_TOLERANCE = 1e-4
_MASK = (1 << 63) - 1


def _unscaled() -> float:
    return 1.0  # no lambda: where processes are spawned, it is pickled


def _unknown() -> None:
    return None


def _never() -> bool:
    return False


@dataclass(slots=True)
class StepContext:
    """Where the run is; set by whoever drives the engine before each step.

    Attributes:
        step_index: Index of the training step, from 0: it draws the chunk order and seeds dropout.
        batch_number: Returns a number of everything in the batch.
        graph_of_node: `[num_nodes]` of the batch, if it is a batch of graphs that says so.
        num_nodes: Returns the nodes of the batch, if it is a graph.
        loss: The last loss, to be compared between ranks.
        loss_scale: Returns the factor on the loss before it goes backward.
        validates_next: Returns whether validation will run before the next step, with its weights.
        is_validating: Whether the Trainer runs validation.
        averages_weights: Whether validation may run with averages of weights.
        signals: Bits that this rank wants all to know.
        is_uneven: Whether replicas may make different numbers of passes, as in prediction, so that
            none may wait for another.
    """

    step_index: int = 0
    batch_number: Callable[[], int] = int
    graph_of_node: Tensor | None = None
    num_nodes: Callable[[], int | None] = _unknown
    loss: float = 0.0
    loss_scale: Callable[[], float] = _unscaled
    validates_next: Callable[[], bool] = _never
    is_validating: bool = False
    averages_weights: bool = False
    signals: int = 0
    is_uneven: bool = False


def batch_number(batch: Any, contents: ContentNumbers) -> int:
    """Return a signed 64-bit number of the tensors in a batch; of a plain one, of its value."""
    dense = [contents.of(one) for one in tensors_in(batch) if one.layout is torch.strided]
    is_plain = isinstance(batch, bool | int | float | str)
    return fold([*dense, text_fingerprint(repr(batch))] if is_plain else dense)


def graph_of_node(batch: Any) -> Tensor | None:
    """Return the batch vector of a PyG `Batch`, or of the first one in a tuple or list."""
    graphs = (one.batch for one in _graphs(batch) if isinstance(one, Batch))
    return next((one for one in graphs if isinstance(one, Tensor) and one.numel()), None)


def num_nodes(batch: Any) -> int | None:
    """Return the nodes of a PyG `Data`, or of the first one in a tuple or list."""
    return next((one.num_nodes for one in _graphs(batch)), None)


def _graphs(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Batch | Data):
        yield batch
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _graphs(item)


class Agreed(NamedTuple):
    """What all ranks know of each other.

    Attributes:
        signals: Those of any of them.
        is_lost: Whether the last step has left on any of them what no later one may read.
        has_jumped: Whether the last loss has jumped on any of them.
        input: Number of what the module is given, by all of them.
        num_bytes: Bytes of the largest histories on any of them.
    """

    signals: int
    is_lost: bool
    has_jumped: bool
    input: int
    num_bytes: int


def agree(
    transport: Transport,
    reads: WeightReads,
    progress: StepContext,
    graph: int,
    *,
    is_training: bool,
    is_lost: bool,
    has_jumped: bool,
    input_number: int = 0,
    num_bytes: int = 0,
) -> Agreed:
    """Refuse to go on if the ranks differ. A collective call.

    Batch and loss are compared within each replica, and all ranks see what is found in any.

    Args:
        transport: The ranks.
        reads: Lets them meet.
        progress: Of this rank.
        graph: Fingerprint of the graph.
        is_training: Whether this rank runs a training step.
        is_lost: Whether the last step is lost on this rank.
        has_jumped: Whether the last loss has jumped.
        input_number: Of what the module is given on this rank.
        num_bytes: Bytes of the largest histories on this rank.

    Raises:
        GraphError: If they have different batches.
        UnsupportedError: If only some are training, or run the module at all, or the last loss was
            not the same everywhere.
    """
    loss_bits = struct.unpack("<q", struct.pack("<d", progress.loss))[0]
    batch = progress.batch_number() if transport.world.is_distributed else 0
    numbers = [batch, loss_bits, graph, progress.signals]
    numbers += [int(is_lost), int(has_jumped), input_number, num_bytes]
    what = f"{'train' if is_training else 'evaluate'} the pipelined module"
    ranks = reads.meet(what, numbers)
    size = transport.world.replica_size
    for start in range(0, len(ranks), size):
        _compare(ranks[start : start + size])
    signals = 0
    for rank in ranks:
        signals |= rank[3]
    inputs = {rank[6] for rank in ranks}
    return Agreed(
        signals,
        any(rank[4] for rank in ranks),
        any(rank[5] for rank in ranks),
        # Tensors that ranks have computed may differ in their last bits.
        inputs.pop() if len(inputs) == 1 else fold(rank[6] for rank in ranks),
        max(rank[7] for rank in ranks),
    )


def _compare(ranks: Sequence[Sequence[int]]) -> None:
    """Refuse to go on if the ranks of a replica differ; see `agree`."""
    if len({(rank[0], rank[2]) for rank in ranks}) > 1:
        raise GraphError(
            explain(
                expected="the same batch on every rank",
                found="batches that differ",
                remedy="Call lightning.seed_everything(...) before random splits and transforms, "
                "and use the same data set everywhere; the strategy cuts the graph itself. A "
                "sampler of your own takes strategy.distributed_sampler_kwargs.",
            )
        )
    losses = [struct.unpack("<d", struct.pack("<q", rank[1]))[0] for rank in ranks]
    if max(losses) - min(losses) > _LOSS_TOLERANCE * max(abs(loss) for loss in losses):
        raise UnsupportedError(
            explain(
                expected="the same loss on every rank",
                found=", ".join(f"{loss:.6g}" for loss in losses),
                remedy="Seed random numbers in training_step, and compute the loss from what all "
                "ranks have alike.",
            )
        )


class PassSeeds:
    """The seeds of a run.

    Args:
        seed: Of the run.
        transport: The ranks.
        progress: Where the run is.
        module: The pipelined module.

    Attributes:
        num_inferences: Passes without gradients that drew random numbers.
    """

    def __init__(
        self, seed: int, transport: Transport, progress: StepContext, module: nn.Module
    ) -> None:
        self._seed, self._transport, self._progress = seed, transport, progress
        self._module = module
        self.num_inferences = 0
        self._last_step, self._num_passes = -1, 0

    def of_training(self) -> SeedOf:
        """Begin a training pass and return its seeds."""
        transport = self._transport
        step = self._progress.step_index
        self._num_passes = self._num_passes + 1 if step == self._last_step else 0
        self._last_step = step
        # A second pass in a step draws others, by numbers that no step has.
        seeds = self._make(self._seed, step - (self._num_passes << 40))
        transport.begin_step(seeds(transport.world.rank, -1))
        return seeds

    def of_inference(self) -> SeedOf | None:
        """Begin a pass without gradients and return its seeds; None if dropout is off."""
        if not self._module.training:
            return None
        self.num_inferences += 1
        return self._make(~self._seed, self.num_inferences)

    def _make(self, seed: int, number: int) -> SeedOf:
        mesh = self._transport.mesh
        return make_seeds(seed, number, mesh.shard, mesh.replica)

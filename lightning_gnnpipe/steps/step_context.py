"""Facts of a step, seeds of its passes, and their comparison over ranks."""

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


@dataclass(frozen=True, slots=True)
class StepContext:
    """Facts of one step, set by the strategy.

    Attributes:
        step_index: Index of the training step, from 0; seeds chunk order and dropout.
        loss_scale: Factor on the loss in the present backward.
        signals: Bits of the signals that this rank has received.
        averages_weights: Whether validation may run with averages of weights.
        is_uneven: Whether replicas may run different numbers of passes, as in prediction; then no
            rank waits for another replica.
    """

    step_index: int = 0
    batch: Any = None
    loss_scale: float = 1.0
    signals: int = 0
    is_validating: bool = False
    averages_weights: bool = False
    is_uneven: bool = False


def batch_number(batch: Any, contents: ContentNumbers) -> int:
    """Return a signed 64-bit fingerprint of the batch's tensors, or of a plain batch."""
    dense = [contents.of(one) for one in tensors_in(batch) if one.layout is torch.strided]
    is_plain = isinstance(batch, bool | int | float | str)
    return fold([*dense, text_fingerprint(repr(batch))] if is_plain else dense)


def graph_of_node(batch: Any) -> Tensor | None:
    """Return the batch vector of the first PyG `Batch` in the user's batch, if any."""
    graphs = (one.batch for one in _graphs(batch) if isinstance(one, Batch))
    return next((one for one in graphs if isinstance(one, Tensor) and one.numel()), None)


def num_nodes(batch: Any) -> int | None:
    """Return the number of nodes of the first PyG `Data` in the user's batch, if any."""
    return next((one.num_nodes for one in _graphs(batch)), None)


def _graphs(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Batch | Data):
        yield batch
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _graphs(item)


class Agreed(NamedTuple):
    """Facts of all ranks.

    Attributes:
        signals: Bits received by any rank.
        is_lost: Whether any rank has lost its histories in the last step.
        has_jumped: Whether the last loss has jumped on any rank.
        input: Fingerprint of the inputs of all ranks.
        num_bytes: Bytes of the largest histories on any rank.
    """

    signals: int
    is_lost: bool
    has_jumped: bool
    input: int
    num_bytes: int


def agree(
    transport: Transport,
    reads: WeightReads,
    step: StepContext,
    batch: Callable[[], int],
    loss: float,
    graph: int,
    *,
    is_training: bool,
    is_lost: bool,
    has_jumped: bool,
    input_number: int = 0,
    num_bytes: int = 0,
) -> Agreed:
    """Exchange the facts of a step, and refuse to go on if ranks differ; collective.

    Batch and loss must agree within a replica. `batch` returns the batch's fingerprint; `graph` and
    `input_number` are fingerprints too.

    Raises:
        GraphError: If ranks have different batches.
        UnsupportedError: If ranks run different steps, or their last losses differ.
    """
    loss_bits = struct.unpack("<q", struct.pack("<d", loss))[0]
    number = batch() if transport.world.is_distributed else 0
    numbers = [number, loss_bits, graph, step.signals]
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
    """Seeds of passes; `num_inferences` counts random passes without gradients."""

    def __init__(self, seed: int, transport: Transport, module: nn.Module) -> None:
        self._seed, self._transport, self._module = seed, transport, module
        self.step_index = self.num_inferences = 0
        self._last_step, self._num_passes = -1, 0

    def of_training(self) -> SeedOf:
        """Start a training pass and return its seeds."""
        transport = self._transport
        step = self.step_index
        self._num_passes = self._num_passes + 1 if step == self._last_step else 0
        self._last_step = step
        # A second pass in a step gets a negative number, which no step has.
        seeds = self._make(self._seed, step - (self._num_passes << 40))
        transport.begin_step(seeds(transport.world.rank, -1))
        return seeds

    def of_inference(self) -> SeedOf | None:
        """Start a pass without gradients and return its seeds; None without dropout."""
        if not self._module.training:
            return None
        self.num_inferences += 1
        return self._make(~self._seed, self.num_inferences)

    def _make(self, seed: int, number: int) -> SeedOf:
        mesh = self._transport.mesh
        return make_seeds(seed, number, mesh.shard, mesh.replica)

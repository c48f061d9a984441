"""Requests for a step, facts of it, their comparison over ranks, and the seeds of its passes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from lightning_gnnpipe.chunks import SeedOf, make_seeds, own_random_stream
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import GraphError, UnsupportedError
from lightning_gnnpipe.graph import (
    ContentNumbers,
    StoredGraph,
    fold,
    tensors_in,
    text_fingerprint,
)

_LOSS_TOLERANCE = 1e-4


@dataclass(slots=True)
class Controls:
    """Requests for the next training step; each step switches them off again.

    Callbacks only switch requests on, in `on_train_batch_start` or before, so the order of
    callbacks does not matter.

    Attributes:
        is_exact: Run the whole graph as one chunk, without stale reads; writes all histories.
        refreshes: Recompute all histories before the step, by an exact pass without dropout, unless
            validation has just written them.
        takes_validation: Let a validation before the step write the histories of its input.
        reads_snapshot: Read stale embeddings from the last snapshot, if there is one.
        takes_snapshot: Take a snapshot of all embeddings after the forward pass.
        records_staleness: Record which chunks are read stale, and how far embeddings drift.
        is_synchronous: Let shards wait for each other's activations, even with `async_halo`.
    """

    is_exact: bool = False
    refreshes: bool = False
    takes_validation: bool = False
    reads_snapshot: bool = False
    takes_snapshot: bool = False
    records_staleness: bool = False
    is_synchronous: bool = False

    def reset(self) -> None:
        """Switch all requests off."""
        for field in fields(self):
            setattr(self, field.name, field.default)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Facts of one step, set by the strategy.

    `caller`: the user's step that runs now: "training", of a fit, or "evaluation".
    """

    caller: Literal["training", "evaluation"] | None = None
    step_index: int = 0  # of training, from 0; seeds chunk order and dropout
    batch: Any = None
    loss_scale: float = 1.0
    is_validating: bool = False
    averages_weights: bool = False  # validation may run with averages of weights
    is_uneven: bool = False  # replicas may run different numbers of passes, so none may wait


def batch_number(batch: Any, contents: ContentNumbers) -> int:
    """Return a signed 64-bit fingerprint of the batch's tensors, or of a plain batch."""
    dense = [contents.of(one) for one in tensors_in(batch) if one.layout is torch.strided]
    is_plain = isinstance(batch, bool | int | float | str)
    return fold([*dense, text_fingerprint(repr(batch))] if is_plain else dense)


def graph_of_node(batch: Any) -> Tensor | None:
    """Return the batch vector of the first PyG `Batch` in the user's batch, if any."""
    for one in _graphs(batch):
        vector = one.batch if isinstance(one, Batch) else None
        if isinstance(vector, Tensor) and vector.numel():
            return vector
    return None


def num_nodes(batch: Any) -> int | None:
    """Return the number of nodes of the first PyG `Data` in the user's batch, if any."""
    return next((one.num_nodes for one in _graphs(batch)), None)


def stored_graph(batch: Any) -> StoredGraph | None:
    """Return the folder that a graph of the user's batch is from, unless it is a part of it."""
    for one in _graphs(batch):
        found = getattr(one, "stored", None)
        found = found[0] if isinstance(found, list) and len(found) == 1 else found  # collated
        if isinstance(found, StoredGraph) and found.nodes.numel() == one.num_nodes:
            return found
    return None


def _graphs(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Batch | Data):
        yield batch
    elif isinstance(batch, list | tuple | dict):
        for item in batch.values() if isinstance(batch, dict) else batch:
            yield from _graphs(item)


@dataclass(frozen=True)
class Facts:
    """Facts of a step on one rank; `agree` merges the last four."""

    batch: int  # fingerprint
    loss: float  # of the step before
    graph: int  # fingerprint
    num_training: int  # modules in train mode
    is_lost: bool  # whether histories are invalid, on any rank
    input: int  # number of the input
    num_bytes: int  # of histories, the most of all ranks
    is_traced: bool  # whether any rank traces the module anew, so that all do


def agree(transport: Transport, own: Facts, *, is_training: bool, is_uneven: bool) -> Facts:
    """Exchange facts of a step; refuse different steps or batches in a replica; collective."""
    [loss_bits] = struct.unpack("<q", struct.pack("<d", own.loss))
    what = f"{'train' if is_training else 'evaluate'} the pipelined module"
    over = transport if is_uneven else transport.everyone
    with transport.meter.paused():
        ranks = over.meet(what, list(map(int, astuple(replace(own, loss=loss_bits)))))
    size = transport.world.replica_size
    for start in range(0, len(ranks), size) if size > 1 else ():
        _compare(ranks[start : start + size])
    _, _, _, _, lost, inputs, sizes, traced = zip(*ranks, strict=True)
    # Tensors computed on each rank may differ in their last bits.
    shared = inputs[0] if len(set(inputs)) == 1 else fold(inputs)
    merged = {"is_lost": any(lost), "num_bytes": max(sizes), "is_traced": any(traced)}
    return replace(own, input=shared, **merged)


def _compare(ranks: Sequence[Sequence[int]]) -> None:
    if len({(rank[0], rank[2]) for rank in ranks}) > 1:
        raise GraphError(
            expected="the same batch on every rank",
            found="different batches",
            remedy="Call lightning.seed_everything(...) before random splits and transforms, "
            "and load the same data on every rank. Pass strategy.distributed_sampler_kwargs "
            "to a sampler of your own.",
        )
    if len({rank[3] for rank in ranks}) > 1:
        raise UnsupportedError(
            "The pipelined module is in train mode on one rank and in eval mode on another.\n"
            "All ranks run a step together.\nCall net.train() and net.eval() on all ranks."
        )
    losses = [struct.unpack("<d", struct.pack("<q", rank[1]))[0] for rank in ranks]
    if max(losses) - min(losses) > _LOSS_TOLERANCE * max(abs(loss) for loss in losses):
        raise UnsupportedError(
            expected="the same loss on every rank",
            found=", ".join(f"{loss:.6g}" for loss in losses),
            remedy="Seed the random numbers of training_step, and let the loss not depend on "
            "the rank.",
        )


class PassSeeds:
    """Seeds of training passes."""

    def __init__(self, seed: int, transport: Transport) -> None:
        self._seed, self._transport = seed, transport
        self.step_index = 0
        self._last_step, self._num_passes = -1, 0
        self._head_seed = 0

    def of_training(self) -> SeedOf:
        """Start a training pass and return its seeds."""
        transport, mesh = self._transport, self._transport.mesh
        step = self.step_index
        self._num_passes = self._num_passes + 1 if step == self._last_step else 0
        self._last_step = step
        # A second pass in a step gets a negative number, which no step has.
        number = step - (self._num_passes << 40)
        self._head_seed = make_seeds(self._seed, number, 0, mesh.replica)(-1, 0)
        seeds = make_seeds(self._seed, number, mesh.shard, mesh.replica)
        transport.seed = seeds(transport.world.rank, -1)
        return seeds

    def of_step(self, number: int) -> SeedOf:
        """Return the seeds of the first training pass of step `number`."""
        mesh = self._transport.mesh
        return make_seeds(self._seed, number, mesh.shard, mesh.replica)

    @contextmanager
    def of_head(self) -> Iterator[None]:
        """Draw the random numbers of the head of the training pass, equal on all ranks."""
        with own_random_stream(self._transport.world.device):
            torch.manual_seed(self._head_seed)
            yield

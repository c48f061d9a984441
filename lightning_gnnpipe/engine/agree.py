"""Comparing what ranks are about to do before any of them waits for another."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch_geometric.data import Batch

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import GraphError, UnsupportedError, explain
from lightning_gnnpipe.graph import tensor_fingerprint
from lightning_gnnpipe.nested import tensors_in

_LOSS_TOLERANCE = 1e-4
_MASK = (1 << 63) - 1


def _unscaled() -> float:
    return 1.0  # no lambda: where processes are spawned, it is pickled


def _never() -> bool:
    return False


@dataclass(slots=True)
class Progress:
    """Where the run is; set by whoever drives the engine before each step.

    Attributes:
        step_index: Index of the training step, from 0: it draws the chunk order and seeds dropout.
        batch_fingerprint: Of everything in the batch.
        graph_of_node: `[num_nodes]` of the batch, if it is a batch of graphs that says so.
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
    batch_fingerprint: int = 0
    graph_of_node: Tensor | None = None
    loss: float = 0.0
    loss_scale: Callable[[], float] = _unscaled
    validates_next: Callable[[], bool] = _never
    is_validating: bool = False
    averages_weights: bool = False
    signals: int = 0
    is_uneven: bool = False


class BatchFingerprints:
    """Fingerprints of batches; a tensor that was not written to since is not read again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, int]] = {}

    def of(self, batch: Any) -> int:
        """Return a 63-bit number of the shapes, dtypes and contents of the batch's tensors."""
        known, total = {}, 0
        for tensor in tensors_in(batch):
            if str(tensor.layout) != "torch.strided":
                continue
            version = version_of(tensor)
            last = self._known.get(id(tensor))
            if last is not None and last[0] is tensor and last[1] == version >= 0:
                number = last[2]
            else:
                number = tensor_fingerprint(tensor)
            known[id(tensor)] = (tensor, version, number)
            total = (total * 1_000_003 + number) & _MASK
        self._known = known
        return total


def graph_of_node(batch: Any) -> Tensor | None:
    """Return the batch vector of a PyG `Batch`, or of the first one in a tuple or list."""
    if isinstance(batch, list | tuple):
        found = (graph_of_node(item) for item in batch)
        return next((one for one in found if one is not None), None)
    vector = batch.batch if isinstance(batch, Batch) else None
    return vector if isinstance(vector, Tensor) and vector.numel() else None


class Agreed(NamedTuple):
    """What all ranks know of each other.

    Attributes:
        signals: Those of any of them.
        is_lost: Whether the last step has left on any of them what no later one may read.
        has_jumped: Whether the last loss has jumped on any of them.
    """

    signals: int
    is_lost: bool
    has_jumped: bool


def agree(
    transport: Transport,
    progress: Progress,
    graph: int,
    *,
    is_training: bool,
    is_lost: bool,
    has_jumped: bool,
) -> Agreed:
    """Refuse to go on if the ranks differ. A collective call.

    Batch and loss are compared within each replica, and all ranks see what is found in any.

    Args:
        transport: The ranks.
        progress: Of this rank.
        graph: Fingerprint of the graph.
        is_training: Whether this rank runs a training step.
        is_lost: Whether the last step is lost on this rank.
        has_jumped: Whether the last loss has jumped.

    Raises:
        GraphError: If they have different batches.
        UnsupportedError: If only some are training, or run the module at all, or the last loss was
            not the same everywhere.
    """
    loss_bits = struct.unpack("<q", struct.pack("<d", progress.loss))[0]
    numbers = [progress.batch_fingerprint, loss_bits, graph, progress.signals]
    numbers += [int(is_lost), int(has_jumped)]
    what = f"{'train' if is_training else 'evaluate'} the pipelined module"
    ranks = (transport if progress.is_uneven else transport.everyone).meet(what, numbers)
    size = transport.world.replica_size
    for start in range(0, len(ranks), size):
        _compare(ranks[start : start + size])
    signals = 0
    for rank in ranks:
        signals |= rank[3]
    return Agreed(signals, any(rank[4] for rank in ranks), any(rank[5] for rank in ranks))


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
                remedy="On each rank the parameters of other stages are empty: use the optimizer's "
                "weight_decay in place of a penalty on self.parameters(), and seed random numbers "
                "in training_step.",
            )
        )

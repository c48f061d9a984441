"""Partition nodes into chunks of equal weight, and chunks into shards, with few cut edges.

Also checks the user's graph, number of chunks and partition.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from importlib import import_module
from tempfile import NamedTemporaryFile
from typing import Any

import pymetis
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnnpipe.errors import ConfigError, GraphError
from lightning_gnnpipe.types import Partition

_NUM_SWEEPS = 3
_BLOCK = 1 << 20  # numbers that are looked at together
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def partition_nodes(
    edge_index: Tensor, num_nodes: int, *, num_chunks: int, method: Partition, seed: int = 0
) -> Tensor:
    """Return `[num_nodes]` the chunk of each node; no chunk is empty.

    `method`: "metis", "kaminpar", "random", "contiguous" (ranges of node numbers), or the
    assignment itself. Chunks of the first three weigh at most 5 % more than the mean if single
    nodes allow it.
    """
    check_num_chunks(num_chunks, num_nodes)
    if isinstance(method, Tensor):
        check_assignment(method, num_nodes, num_chunks)
        return method.long().cpu()
    # The work of a node: its row and its in-edges.
    weights = 1 + torch.bincount(edge_index[1], minlength=num_nodes)
    if num_chunks == 1:
        return torch.zeros(num_nodes, dtype=torch.int64)
    if method == "contiguous":
        return _assign_nodes(torch.arange(num_nodes), weights, num_chunks)
    links = _symmetrize(edge_index, num_nodes)
    if method == "random":
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_nodes, generator=generator)
        assignment = _assign_nodes(order, weights, num_chunks)
    else:
        assert method in ("metis", "kaminpar"), method
        find = _metis if method == "metis" else _kaminpar
        assignment = find(links, weights, num_chunks, seed)  # METIS balances skewed graphs poorly
    return rebalance(assignment, weights, links, num_chunks)


def _metis(links: Tensor, weights: Tensor, num_chunks: int, seed: int) -> Tensor:
    starts, ends = starts_of(links[0], weights.numel()).to(torch.int32), links[1].to(torch.int32)
    adjacency = pymetis.CSRAdjacency(starts.numpy(), ends.numpy())
    _, parts = pymetis.part_graph(
        num_chunks,
        adjacency=adjacency,
        vweights=weights.to(torch.int32).numpy(),
        options=pymetis.Options(seed=seed % (1 << 31)),
    )
    return torch.as_tensor(parts, dtype=torch.int64)


def _kaminpar(links: Tensor, weights: Tensor, num_chunks: int, seed: int) -> Tensor:
    """Source: Gottesbueren et al., Deep multilevel graph partitioning (ESA 2021)."""
    try:
        kaminpar: Any = import_module("kaminpar")
    except ImportError as error:
        raise ConfigError(
            expected="the package 'kaminpar' for partition='kaminpar'",
            found="no such package",
            remedy="Run `pip install kaminpar`, or use partition='metis'.",
        ) from error
    num_nodes = weights.numel()
    first = 8 * (3 + num_nodes + 1)  # byte of the first link
    header = torch.tensor([1 + 8, num_nodes, links.size(1)])  # links have no weights and 32 bits
    places = first + 4 * starts_of(links[0], num_nodes)
    with NamedTemporaryFile() as file:  # the package reads files only, here in ParHIP's format
        for part in (header, places, links[1].int(), weights):
            part.numpy().tofile(file)
        graph = kaminpar.load_graph(file.name, kaminpar.GraphFileFormat.PARHIP)
    kaminpar.reseed(seed % (1 << 31))
    num_threads = 1 if torch.are_deterministic_algorithms_enabled() else torch.get_num_threads()
    solver = kaminpar.KaMinPar(num_threads, kaminpar.default_context())
    return torch.tensor(solver.compute_partition(graph, num_chunks, 0.03))


def starts_of(numbers: Tensor, count: int) -> Tensor:
    """Return `[count + 1]` where each of `count` numbers starts when they are sorted; the end."""
    return F.pad(torch.bincount(numbers, minlength=count).cumsum(0), (1, 0))


def _symmetrize(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return each pair of linked nodes once per direction, without self-loops, sorted."""
    source, target = edge_index.long()
    is_proper = source != target
    source, target = source[is_proper], target[is_proper]
    keys = torch.cat([source * num_nodes + target, target * num_nodes + source])
    keys.numpy().sort()  # in place, by vector instructions: twice as fast as torch.unique
    keys = torch.unique_consecutive(keys)
    return torch.stack([keys // num_nodes, keys % num_nodes])


def _assign_nodes(order: Tensor, weights: Tensor, num_chunks: int) -> Tensor:
    """Cut the nodes, in this order, into non-empty runs of about equal weight."""
    ordered = weights[order].double()
    total = ordered.cumsum(0)
    targets = total[-1] * torch.arange(1, num_chunks) / num_chunks
    cuts = torch.searchsorted(total - ordered / 2, targets).tolist()
    for i in range(num_chunks - 1):  # leave at least one node for each run
        least = cuts[i - 1] + 1 if i else 1
        cuts[i] = min(max(cuts[i], least), order.numel() - (num_chunks - 1 - i))
    assignment = torch.empty_like(order)
    for chunk, nodes in enumerate(order.tensor_split(cuts)):
        assignment[nodes] = chunk
    return assignment


def split_chunks(edge_index: Tensor, assignment: Tensor, num_shards: int) -> Tensor:
    """Return `[num_nodes]` the shard of each node, given its chunk; no shard is empty.

    Chunks are the same for any number of shards, so staleness is too. METIS cuts each into parts of
    equal weight, which are matched to shards so that neighbors in different chunks share one.
    """
    num_nodes = assignment.numel()
    if num_nodes < num_shards:
        raise ConfigError(
            expected=f"'graph_parallel' to be at most the number of nodes, {num_nodes}",
            found=str(num_shards),
            remedy="Use fewer devices: the graph is small.",
        )
    num_chunks = int(assignment.max()) + 1
    edges = edge_index[:, edges_within(edge_index, assignment)]
    chunk_of_edge = assignment[edges[1]]
    part, number = torch.empty_like(assignment), torch.empty_like(assignment)
    for chunk in range(num_chunks):
        nodes = (assignment == chunk).nonzero().flatten()
        number[nodes] = torch.arange(nodes.numel())
        if nodes.numel() < num_shards:  # too few for all shards: assign in turn
            part[nodes] = (number[nodes] + chunk) % num_shards
            continue
        part[nodes] = partition_nodes(
            number[edges[:, chunk_of_edge == chunk]],
            nodes.numel(),
            num_chunks=num_shards,
            method="metis",
        )
    shards = _align(edge_index, assignment, part, num_shards)
    return _fill_empty(shards, torch.ones_like(shards), num_shards)


def _align(edge_index: Tensor, assignment: Tensor, part: Tensor, num_shards: int) -> Tensor:
    """Return the shard of each node: parts of a chunk are permuted to cut fewer edges."""
    num_chunks = int(assignment.max()) + 1
    piece = assignment * num_shards + part
    num_pieces = num_chunks * num_shards
    source, target = piece[edge_index[0]], piece[edge_index[1]]
    keys, counts = torch.unique(source * num_pieces + target, return_counts=True)
    links = torch.zeros(num_pieces, num_pieces, dtype=torch.int64)
    links[keys // num_pieces, keys % num_pieces] = counts
    links = links + links.t()
    sizes = torch.bincount(piece, minlength=num_pieces)
    shard = torch.arange(num_pieces) % num_shards
    for _ in range(_NUM_SWEEPS):
        for chunk in range(num_chunks):
            own = slice(chunk * num_shards, (chunk + 1) * num_shards)
            if sizes[own].min() == 0:  # an empty part: keep the shards assigned in turn
                continue
            links_out = links[own].clone()
            links_out[:, own] = 0
            gain = torch.zeros(num_shards, num_shards, dtype=torch.int64)
            gain.index_add_(1, shard, links_out)
            shard[own] = _match(gain)
    return shard[piece]


def _match(gain: Tensor) -> Tensor:
    """Return a different column for each row, largest entries first."""
    size = gain.size(0)
    found = torch.full((size,), -1)
    left = gain.clone()
    for _ in range(size):
        row, column = divmod(int(left.argmax()), size)
        found[row] = column
        left[row], left[:, column] = -1, -1
    return found


@dataclass(frozen=True, slots=True, eq=False)
class SplitSizes:
    """Sizes of the pieces of chunks in shards; each is `[num_chunks, num_shards]`."""

    nodes: Tensor
    edges: Tensor  # that end in the piece
    sent: Tensor  # rows of the piece that other shards read, counted once per reader
    received: Tensor  # rows of the chunk in other shards that this shard reads
    peers: Tensor  # shards sent to, or shards received from, whichever are more


def measure_split(
    edge_index: Tensor, assignment: Tensor, shards: Tensor, num_shards: int
) -> SplitSizes:
    """Return the sizes of all pieces, and the rows exchanged whenever a chunk is written."""
    num_chunks = int(assignment.max()) + 1
    piece = assignment * num_shards + shards
    reader, read = remote_reads(edge_index, shards)
    chunk, owner = assignment[read], shards[read]
    links = torch.unique((chunk * num_shards + owner) * num_shards + reader)  # (piece, reader)
    sends, gets = links // num_shards, links // num_shards**2 * num_shards + links % num_shards

    def count(pieces: Tensor) -> Tensor:
        sizes = torch.bincount(pieces, minlength=num_chunks * num_shards)
        return sizes.view(num_chunks, num_shards)

    return SplitSizes(
        nodes=count(piece),
        edges=count(piece[edge_index[1].long()]),
        sent=count(piece[read]),
        received=count(chunk * num_shards + reader),
        peers=torch.maximum(count(sends), count(gets)),
    )


def edges_within(edge_index: Tensor, assignment: Tensor) -> Tensor:
    """Return `[num_kept]` the edges with both ends in one part, ascending."""
    source, target = assignment[edge_index.long()]
    return (source == target).nonzero().flatten()


def edge_cut_frac(edge_index: Tensor, assignment: Tensor) -> float:
    """Return the fraction of edges between different parts; 0 without edges."""
    if edge_index.size(1) == 0:
        return 0.0
    source, target = assignment[edge_index.long()]
    return float((source != target).double().mean())


def remote_reads(edge_index: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts that read nodes of other parts, and these nodes: each pair once, sorted."""
    source, target = edge_index.long()
    reader, num_nodes = part[target], part.numel()
    is_remote = part[source] != reader
    pairs = torch.unique(reader[is_remote] * num_nodes + source[is_remote])
    return pairs // num_nodes, pairs % num_nodes


def check_graph(edge_index: Tensor, num_nodes: int) -> None:
    """Raise GraphError unless there is a node and `edge_index` passes `check_edges`."""
    if num_nodes < 1:
        raise GraphError(
            expected="a graph of at least one node",
            found=str(num_nodes),
            remedy="Check where the graph comes from.",
        )
    check_edges(edge_index, num_nodes)


def check_edges(edges: Any, num_nodes: int, name: str = "edge_index") -> None:
    """Raise GraphError unless `edges` holds `[2, num_edges]` integers in `[0, num_nodes)`."""
    place = name if "." in name else f"data.{name}"
    if not isinstance(edges, Tensor) or edges.dtype not in _INTEGERS:
        tensor = place if isinstance(edges, Tensor) else f"torch.as_tensor({place})"
        remedy = f"Write {place} = {tensor}.long()."
        if isinstance(edges, Tensor) and edges.dtype is torch.bool:
            remedy = f"Of an adjacency matrix write {place} = {place}.nonzero().t().contiguous()."
        raise GraphError(
            expected=f"'{name}' to hold integers",
            found=str(getattr(edges, "dtype", type(edges).__name__)),
            remedy=remedy,
        )
    if edges.dim() != 2 or edges.size(0) != 2:
        raise GraphError(
            expected=f"'{name}' to have shape [2, num_edges]",
            found=str(list(edges.shape)),
            remedy="Row 0 holds the sources of the edges, row 1 their targets. For pairs "
            f"[num_edges, 2] write {place} = {place}.t().contiguous().",
        )
    if edges.numel() == 0:
        return
    low, high = int(edges.min()), int(edges.max())
    if low < 0 or high >= num_nodes:
        raise GraphError(
            expected=f"'{name}' to name nodes from 0 to {num_nodes - 1}",
            found=f"node {low if low < 0 else high}",
            remedy=f"The graph has {num_nodes} nodes: add the missing rows of node features, or "
            "correct the edges. If you gave the network x[mask], give it x, and mask its outputs.",
        )


def first_not_finite(values: object, where: str = "in row") -> str | None:
    """Return the first value of a dense tensor that is nan or infinite, as "nan in row 3"."""
    if not isinstance(values, Tensor) or values.layout is not torch.strided:
        return None
    if not values.is_floating_point():
        return None
    rows = values.detach() if values.dim() else values.detach().view(1)
    height = max(_BLOCK // max(rows[:1].numel(), 1), 1)
    for first in range(0, rows.size(0), height):
        block = rows[first : first + height]
        if not bool((is_finite := block.isfinite()).all()):
            place = (~is_finite).nonzero()[0].tolist()
            numbers = [first + place[0], *place[1:]][: values.dim()]
            named = zip((where, ", column", *[","] * len(place)), numbers, strict=False)
            value = float(block[tuple(place)])
            return f"{value:g} " + "".join(f"{name} {number}" for name, number in named)
    return None


def check_num_chunks(num_chunks: int, num_nodes: int) -> None:
    """Raise ConfigError unless `num_chunks` is between 1 and `num_nodes`."""
    if not 1 <= num_chunks <= num_nodes:
        raise ConfigError(
            expected=f"'num_chunks' to be between 1 and the number of nodes, {num_nodes}",
            found=str(num_chunks),
            remedy="Leave it at 'auto'.",
        )


def check_assignment(assignment: Tensor, num_nodes: int, num_chunks: int) -> None:
    """Raise GraphError unless each node has a chunk number and no chunk is empty."""
    if assignment.dtype not in _INTEGERS or tuple(assignment.shape) != (num_nodes,):
        raise GraphError(
            expected=f"'partition' to be an integer tensor of shape [{num_nodes}]",
            found=f"{assignment.dtype} of shape {list(assignment.shape)}",
            remedy="Give each node the number of its chunk.",
        )
    low, high = int(assignment.min()), int(assignment.max())
    if low < 0 or high >= num_chunks:
        raise GraphError(
            expected=f"'partition' to name chunks from 0 to {num_chunks - 1}",
            found=f"chunk {low if low < 0 else high}",
            remedy="Number the chunks from 0, or correct 'num_chunks'.",
        )
    counts = torch.bincount(assignment.long(), minlength=num_chunks)
    if int(counts.min()) == 0:
        raise GraphError(
            expected="every chunk of 'partition' to have a node",
            found=f"chunk {int(counts.argmin())} has none",
            remedy="Number the chunks without gaps.",
        )


_TOLERANCE = 0.05


def rebalance(assignment: Tensor, weights: Tensor, links: Tensor, num_chunks: int) -> Tensor:
    """Return `assignment` with no empty chunk and none more than 5 % above the mean weight.

    Exceptions: a single node above the bound, or nodes above 5 % of the mean that longest-first
    packing cannot fit. Deterministic. `links`: `[2, num_links]`, in both directions.
    """
    mean = int(weights.sum()) / num_chunks
    limit = max(int((1 + _TOLERANCE) * mean), int(weights.max()))
    is_heavy = weights > _TOLERANCE * mean
    assignment = assignment.clone()
    heavy = is_heavy.nonzero().flatten()
    heavy = heavy[weights[heavy].argsort(descending=True, stable=True)]
    assignment[heavy] = _pack(weights[heavy], assignment[heavy], limit, num_chunks)
    assignment = _fill_empty(assignment, weights, num_chunks)
    room = limit - torch.bincount(assignment, weights.double(), minlength=num_chunks).long()
    sizes = weights.masked_fill(is_heavy, limit + 1)  # fits nowhere, so it stays
    for chunk in room.argsort(stable=True).tolist():
        _drain(assignment, room, sizes, links, chunk)
    return assignment


def _pack(sizes: Tensor, homes: Tensor, limit: int, num_chunks: int) -> Tensor:
    """Return chunks for nodes of descending `sizes`: what exceeds the limit at home moves.

    If that exceeds the limit elsewhere, all nodes are assigned anew, the longest first.
    Source: Graham, Bounds on multiprocessing timing anomalies (1969).
    """
    found = []
    for most in (limit, 0):
        loads, chosen = [0] * num_chunks, homes.tolist()
        moves = []
        for place, size in enumerate(sizes.tolist()):
            if loads[chosen[place]] + size <= most:
                loads[chosen[place]] += size
            else:
                moves.append((place, size))
        heap = [(load, chunk) for chunk, load in enumerate(loads)]
        heapq.heapify(heap)
        for place, size in moves:
            load, chosen[place] = heap[0]
            heapq.heapreplace(heap, (load + size, chosen[place]))
        found.append((max(limit, *(load for load, _ in heap)), chosen))
    _, chosen = min(found, key=lambda one: one[0])  # the first within the limit, else the closest
    return torch.tensor(chosen, dtype=homes.dtype)


def _fill_empty(assignment: Tensor, weights: Tensor, num_chunks: int) -> Tensor:
    """Move a node into each empty part; each other part keeps its heaviest."""
    empty = (torch.bincount(assignment, minlength=num_chunks) == 0).nonzero().flatten()
    if empty.numel() == 0:
        return assignment
    order = weights.argsort(descending=True, stable=True)
    by_chunk = order[assignment[order].argsort(stable=True)]
    chunks = assignment[by_chunk]
    is_spare = torch.ones_like(assignment, dtype=torch.bool)
    is_spare[by_chunk[torch.cat([chunks[:1] >= 0, chunks[1:] != chunks[:-1]])]] = False
    assignment[order[is_spare[order]][: empty.numel()]] = empty
    return assignment


def _drain(assignment: Tensor, room: Tensor, sizes: Tensor, links: Tensor, chunk: int) -> None:
    """Move nodes out of `chunk`, a quarter of its excess at a time, until it has room.

    Those go first that cut the fewest additional edges per unit of their size. Changes `assignment`
    and `room`, `[num_chunks]`, in place.
    """
    num_chunks = room.numel()
    links = links[:, (assignment == chunk)[links[0]]]
    while int(room[chunk]) < 0:
        nodes = (assignment == chunk).nonzero().flatten()
        row = torch.full_like(assignment, -1)
        row[nodes] = torch.arange(nodes.numel())
        source = row[links[0]]
        keys = (source * num_chunks + assignment[links[1]])[source >= 0]
        near = torch.bincount(keys, minlength=nodes.numel() * num_chunks).view(-1, num_chunks)
        size = sizes[nodes, None]
        cost = (near[:, [chunk]] - near) / size - 1e-9 * room  # of equal chunks the emptiest
        cost, target = cost.masked_fill(size > room, torch.inf).min(1)
        order = cost.argsort(stable=True)
        order = order[cost[order] < torch.inf]
        ordered = sizes[nodes[order]]
        order = order[ordered.cumsum(0) - ordered < max(1, -int(room[chunk]) // 4)]
        if order.numel() == 0:
            return
        nodes, target = nodes[order], target[order]
        sent = torch.zeros(order.numel(), num_chunks, dtype=torch.int64)
        sent.scatter_(1, target[:, None], sizes[nodes, None])
        fits = sent.cumsum(0).gather(1, target[:, None])[:, 0] <= room[target]
        assignment[nodes[fits]] = target[fits]
        room -= sent[fits].sum(0)
        room[chunk] += sent[fits].sum()

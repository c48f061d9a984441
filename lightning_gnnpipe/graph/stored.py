"""A graph in a folder: tensors in the order of its plan, memory-mapped, and the plan itself.

    manifest.json         sizes, and the dtype, shape and fingerprint of each array
    x.npy, y.npy, ...     tensors of the graph; row n of nodes belongs to position n
    edge_index.npy        [2, num_edges] positions, sorted by target
    n_id.npy              [num_nodes] the user's node at each position
    plan.edges.npy        the edges of each chunk in turn, in its local numbers
    plan.halo.npy         the halos of all chunks

Numbers of nodes have 64 bits, those that layers index with: nothing is converted or copied.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightning_gnnpipe._compat_torch import pytree
from lightning_gnnpipe.errors import ConfigError, GraphError
from lightning_gnnpipe.graph.chunk import Chunk
from lightning_gnnpipe.graph.fingerprint import fold, set_number, tensor_fingerprint
from lightning_gnnpipe.graph.plan import ChunkPlan, CutChunk

_FORMAT, _VERSION = "graph of lightning_gnnpipe", 1
_MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 26  # written at once
_OF_PLAN = ("plan.edges", "plan.halo")
_BOUNDS = ("index", "start", "end", "halo_chunks", "halo_counts", "edge_start", "edge_end")

Array = tuple[Tensor, Tensor | None]  # a tensor, and the order of its rows


@dataclass(frozen=True, eq=False, repr=False)
class StoredGraph:
    """The plan of an opened folder.

    Attributes:
        source: Fingerprint of what it was written from.
        number: Fingerprint of its graph, as in `InputKey.graph`.
        places: Addresses of the tensors, all in memory-mapped files.
        nodes: `[num_nodes]` the user's node at each position.
        parts: `[num_nodes]` the chunk of each position.
    """

    source: int
    number: int
    cut_frac: float
    places: frozenset[int]
    nodes: Tensor
    parts: Tensor
    plan: ChunkPlan

    def in_users_order(self, outputs: Any) -> Any:
        """Return `outputs` with rows of nodes in the user's order."""
        place = self.nodes.argsort()

        def put(rows: Any) -> Any:
            if rows.ndim == 0 or rows.shape[0] != place.numel():
                return rows
            return rows[place.to(rows.device) if isinstance(rows, Tensor) else place.numpy()]

        return pytree.tree_map_only((Tensor, np.ndarray), put, outputs)


def open_stored(folder: Path) -> tuple[dict[str, Any], StoredGraph]:
    """Return the values of a graph, its tensors memory-mapped, and its plan; nothing is read.

    Raises:
        GraphError: If the folder is none that `write_stored` has written whole.
    """
    about = _read_manifest(folder)
    try:
        arrays = {name: _open_array(folder, name, one) for name, one in about["arrays"].items()}
        edges, halos = (arrays.pop(name) for name in _OF_PLAN)
        plan = _read_plan(about["chunks"], arrays["edge_index"], edges, halos)
        edges_number = about["arrays"]["edge_index"]["fingerprint"]
        stored = StoredGraph(
            source=about["source"],
            number=fold([plan.num_nodes, plan.num_edges, edges_number]),
            cut_frac=about["cut_frac"],
            places=frozenset(one.untyped_storage().data_ptr() for one in arrays.values()),
            nodes=arrays["n_id"],
            parts=plan.chunk_of_position(),
            plan=plan,
        )
        return arrays | about["values"], stored
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        _refuse(folder, f"a manifest that does not fit: {error!r}")


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / _MANIFEST).read_text())
    except OSError as error:
        _refuse(folder, f"no {_MANIFEST}: {error.strerror}")
    except ValueError as error:
        _refuse(folder, f"a damaged {_MANIFEST}: {error}")
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        _refuse(folder, f"another {_MANIFEST}")
    if about["version"] != _VERSION:
        _refuse(folder, f"version {about['version']}; this package reads version {_VERSION}")
    return about


def _open_array(folder: Path, name: str, about: Mapping[str, Any]) -> Tensor:
    path, dtype = folder / f"{name}.npy", getattr(torch, about["dtype"])
    try:  # private pages: shared until somebody writes to them
        is_empty = 0 in about["shape"]
        array = np.load(path, mmap_mode=None if is_empty else "c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        _refuse(folder, f"{path.name} that cannot be read: {error}")
    expected = _as_array(torch.empty(0, dtype=dtype)).dtype, about["shape"]
    if (array.dtype, list(array.shape)) != expected:
        found = f"{array.dtype} of shape {list(array.shape)}"
        _refuse(folder, f"{path.name} with {found}, not {expected[0]} of shape {expected[1]}")
    return set_number(torch.from_numpy(array).view(dtype), about["fingerprint"])


def _read_plan(bounds: Any, edge_index: Tensor, edges: Tensor, halos: Tensor) -> ChunkPlan:
    """Return the plan; `bounds`: what `_BOUNDS` names, by chunk."""
    halo = torch.split(halos, [sum(one["halo_counts"]) for one in bounds])
    local = torch.split(edges, [2 * (one["edge_end"] - one["edge_start"]) for one in bounds])
    chunks = list[Chunk]()
    for own, positions, ends in zip(bounds, halo, local, strict=True):
        own = {name: tuple(one) if isinstance(one, list) else one for name, one in own.items()}
        own |= {"halo": positions, "edge_index": ends.view(2, -1), "is_whole": len(bounds) == 1}
        chunks.append(Chunk(**own))
    num_nodes, num_edges = chunks[-1].end, edge_index.size(1)
    whole = Chunk(0, 0, num_nodes, halos[:0], (), (), 0, num_edges, edge_index, is_whole=True)
    return ChunkPlan(num_nodes, num_edges, torch.arange(num_nodes), None, tuple(chunks), whole)


def _refuse(folder: Path, found: str) -> NoReturn:
    raise GraphError(
        expected=f"{folder} to be a graph that was prepared",
        found=found,
        remedy=f"Write it: prepare_graph(data, {str(folder)!r}, num_chunks=8).",
    )


@contextmanager
def written_whole(folder: Path) -> Iterator[Path | None]:
    """Give a folder that takes the place of `folder` at the end; None if that is taken.

    Whatever ends the block, `folder` is whole or absent. Other processes wait, and then find it.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        if _is_taken(folder):
            yield None
            return
        with _locked(partial) as handle:
            is_free = not _is_taken(folder)  # else by the process that held the lock
            for left in partial.glob("*"):  # by a killed process
                left.unlink()
            try:
                yield partial if is_free else None
                os.fsync(handle)
                if is_free:
                    os.rename(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            expected=f"to write {folder}",
            found=str(error),
            remedy="Nothing is left of it. Make room, or choose another folder.",
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Make `folder` if it is not there, and hold its lock within the block."""
    handle = None
    while handle is None:
        handle = _lock(folder)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock(folder: Path) -> int | None:
    """Make and lock `folder`; return its handle, None if another process has removed it."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY)
        with ExitStack() as after:
            after.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(handle), os.stat(folder)):
                after.pop_all()
                return handle
    return None


def _is_taken(folder: Path) -> bool:
    return folder.is_file() or (folder.is_dir() and any(folder.iterdir()))


def write_stored(
    folder: Path,
    arrays: Mapping[str, Array],
    of_edges: Mapping[str, Tensor],
    num_edges: int,
    cut: tuple[Tensor, Iterable[CutChunk]],
    about: dict[str, Any],
) -> None:
    """Write a graph into an empty folder, block by block, and its edges chunk by chunk.

    `of_edges`: tensors with a row an edge, in the user's order; `cut`: as `cut_in_turn` gives it;
    `about`: `source` of `StoredGraph`, and `values` that are no tensors.
    """
    nodes, chunks = cut
    of_nodes = {**arrays, "n_id": (nodes, None)}
    written = {name: _write_array(folder, name, *one) for name, one in of_nodes.items()}
    bounds, num_cut = list[dict[str, Any]](), 0
    with ExitStack() as stack:

        def make(
            name: str, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.int64
        ) -> _Writer:
            file = stack.enter_context(open(folder / f"{name}.npy", "wb"))
            return _Writer(file, shape, dtype)

        ends = make("edge_index", (2, num_edges))
        local, halos = map(make, _OF_PLAN)
        rows = {name: make(name, one.shape, one.dtype) for name, one in of_edges.items()}
        for chunk, edges, slots in chunks:
            for side, positions in enumerate(edges):
                ends.write(positions, place=side * num_edges + chunk.edge_start)
            local.write(chunk.edge_index.flatten())
            halos.write(chunk.halo)
            for name, one in of_edges.items():
                rows[name].write(one, slots)
            bounds.append({name: getattr(chunk, name) for name in _BOUNDS})
            num_cut += int((chunk.edge_index[0] >= chunk.num_nodes).sum())
        made = {"edge_index": ends, **rows, **dict(zip(_OF_PLAN, (local, halos), strict=True))}
        written |= {name: one.finish() for name, one in made.items()}
    about |= {
        "format": _FORMAT,
        "version": _VERSION,
        "cut_frac": num_cut / max(num_edges, 1),
        "arrays": written,
        "chunks": bounds,
    }
    with open(folder / _MANIFEST, "w") as file:
        json.dump(about, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _write_array(folder: Path, name: str, tensor: Tensor, order: Tensor | None) -> dict[str, Any]:
    """Write the rows of a tensor in this order; return what the manifest says of them."""
    with open(folder / f"{name}.npy", "wb") as file:
        writer = _Writer(file, tensor.shape, tensor.dtype)
        writer.write(tensor, order)
        return writer.finish()


class _Writer:
    """Writes an array into a file, block by block; `shape` None: as many values as are written."""

    def __init__(self, file: BinaryIO, shape: Sequence[int] | None, dtype: torch.dtype) -> None:
        self._file, self._dtype, self._grows = file, dtype, shape is None
        self._shape = (0,) if shape is None else tuple(shape)
        self._begin()
        self._first = file.tell()

    def _begin(self) -> None:
        """Write the header, in which NumPy leaves room for a length that grows."""
        kind = _as_array(torch.empty(0, dtype=self._dtype)).dtype.str
        header = {"descr": kind, "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def write(self, tensor: Tensor, order: Tensor | None = None, place: int | None = None) -> None:
        """Write rows, in this order, behind the last ones, or from value number `place` on."""
        if place is not None:
            self._file.seek(self._first + place * tensor.element_size())
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        height = max(_BLOCK_BYTES // max(rows[:1].nbytes, 1), 1)
        for block in torch.split(rows if order is None else order, height):
            self._file.write(_as_array(block if order is None else rows[block]).tobytes())

    def finish(self) -> dict[str, Any]:
        """Return what the manifest says of the array, once it is on the disk."""
        if self._grows:
            num_bytes = self._file.seek(0, os.SEEK_END) - self._first
            self._shape = (num_bytes // self._dtype.itemsize,)
            self._file.seek(0)
            self._begin()
        self._file.flush()
        os.fsync(self._file.fileno())
        array = np.load(self._file.name, mmap_mode=None if 0 in self._shape else "c")
        fingerprint = tensor_fingerprint(torch.from_numpy(array).view(self._dtype))
        dtype = str(self._dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(self._shape), "fingerprint": fingerprint}


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return an array of the same bits; NumPy has no bfloat16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy()

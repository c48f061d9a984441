"""The private names of torch that the package uses, and what older versions do differently.

`tests/test_compat.py` lists the names.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_LAST_TAG = 2**31 - 1  # of no message
_DISTRIBUTED = os.path.dirname(dist.__file__)

BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM: type[nn.Module] = nn.modules.instancenorm._InstanceNorm

# What the metadata of torch.distributed.checkpoint is pickled from: types that hold data alone.
METADATA_TYPES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(n for n, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


def member_of_metadata(kind: Any, name: str) -> Any:
    """Return a member of an enum: what Python 3.11 pickles as a call of `getattr`.

    Raises:
        TypeError: If something else is asked for.
    """
    if kind is not _MEM_FORMAT_ENCODING:
        raise TypeError(f"{kind!r}.{name} is no part of a checkpoint's metadata")
    return kind[name]


def version_of(tensor: Tensor) -> int:
    """Return a number that changes when `tensor` is written to; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is what torch.compile has returned."""
    return hasattr(module, "_orig_mod")


def has_spectral_norm(module: nn.Module) -> bool:
    """Whether a weight of `module` is divided by an estimate that each forward pass improves."""
    hooks = (type(hook).__name__ for hook in module._forward_pre_hooks.values())
    return type(module).__name__ == "_SpectralNorm" or "SpectralNorm" in hooks


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def search_in(tracer: fx.Tracer, modules: Iterable[ModuleType]) -> None:
    """Have the tracer find its wrapped functions in the globals of `modules` as well."""
    tracer._autowrap_search.extend(modules)


def change_overflows(
    scaler: torch.amp.GradScaler,
    change: Callable[[Mapping[torch.device, Tensor]], dict[torch.device, Tensor]],
) -> Callable[[], None]:
    """Let `change` alter what `scaler` finds on each device; return what ends that.

    All its ways lead through the method that is replaced on this one object: those of `unscale_`
    and of the check for optimizers that unscale by themselves (fused ones).
    """
    find_local = scaler._unscale_grads_
    scaler.__dict__["_unscale_grads_"] = lambda *args, **kwargs: change(find_local(*args, **kwargs))
    return lambda: scaler.__dict__.pop("_unscale_grads_", None)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Let collective calls of `group`, or of all ranks, fail after `timeout`."""
    dist.distributed_c10d._set_pg_timeout(timeout, group or dist.group.WORLD)


def save_tensors(
    tensors: Mapping[str, Tensor],
    writer: Any,
    is_distributed: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Write `tensors`, together with the other ranks of `group` if there are any."""
    if "no_dist" in inspect.signature(save).parameters:  # torch 2.6
        options: dict[str, Any] = {"no_dist": not is_distributed, "process_group": group}
        save(dict(tensors), storage_writer=writer, **options)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is unavailable")
        save(dict(tensors), storage_writer=writer, process_group=group)


def load_tensors(tensors: Mapping[str, Tensor], reader: Any) -> None:
    """Overwrite `tensors` by those that `reader` finds; each process does so alone."""
    if "no_dist" in inspect.signature(load).parameters:  # torch 2.6
        load(dict(tensors), storage_reader=reader, no_dist=True)
        return
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"  # older versions would run whatever code the files hold
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            load_state_dict(dict(tensors), reader, no_dist=True)
    finally:
        os.environ.pop(_SAFE)
        if before is not None:
            os.environ[_SAFE] = before


def clone_store() -> Any:
    """Return the store by which the ranks have met, with a connection of its own if torch can."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def break_groups() -> None:
    """Have every wait of this process in a process group fail, in whatever thread; and the peers'.

    Gloo closes the connections of a group in which a wait has timed out.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() == 1:
            continue
        with suppress(Exception):
            if torch.cuda.is_available():
                group._get_backend(torch.device("cuda")).abort()  # of NCCL
        with suppress(Exception):
            peer = (group.rank() + 1) % group.size()
            group.recv([torch.empty(1)], peer, _LAST_TAG).wait(timedelta(milliseconds=1))


def place_in_torch(thread: int) -> str | None:
    """Return which call of torch.distributed `thread` is in, and from where; None if in none."""
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != dist.distributed_c10d.__file__:
        return None
    name = frame.f_code.co_name
    while frame is not None and _DISTRIBUTED in frame.f_code.co_filename:
        name = name if frame.f_code.co_name == "wrapper" else frame.f_code.co_name
        frame = frame.f_back
    place = "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    return f"run torch.distributed.{name}{place}"


def end_now(status: int) -> None:
    """End this process, whatever its threads do."""
    os._exit(status)

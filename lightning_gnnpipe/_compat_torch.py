"""Private names of torch that the package uses; `tests/test_compat.py` lists them."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from types import FrameType, ModuleType
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_loader import load, load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_LAST_TAG = 2**31 - 1  # no message uses it
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_DISTRIBUTED = os.path.dirname(dist.__file__)

BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
INSTANCE_NORM: type[nn.Module] = nn.modules.instancenorm._InstanceNorm
CALL_OF_MODULE = nn.Module._call_impl.__code__  # runs hooks and the forward

# Types in pickled metadata of torch.distributed.checkpoint; they only hold data.
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
    """Return an enum member, which Python 3.11 pickles as a call of `getattr`."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise TypeError(f"{kind!r}.{name} is no part of a checkpoint's metadata")
    return kind[name]


def version_of(tensor: Tensor) -> int:
    """Return a number that each write to `tensor` changes; -1 if torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def resize(parameter: nn.Parameter, data: Tensor) -> None:
    """Give `parameter` data of another shape.

    A graph that user code keeps may hold the parameter's gradient accumulator, which expects the
    old shape. torch drops it if the dtype changes, not if the shape does.
    """
    other = torch.float32 if data.dtype != torch.float32 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def registry_of(module: nn.Module, name: str) -> dict[str, Any] | None:
    """Return the dict of `module` with parameter, buffer or submodule `name`; None if none."""
    registries = (module._modules, module._parameters, module._buffers)
    return next((one for one in registries if name in one), None)


def fills_grad_of(accumulator: Any) -> bool:
    """Whether the running backward fills a leaf's `grad`; `accumulator` is its node."""
    return bool(torch._C._will_engine_execute_node(accumulator))


# Attributes and methods of a tensor that do not depend on its values.
TENSOR_FLAGS = {
    *("requires_grad", "requires_grad_", "is_leaf", "retains_grad", "grad_fn", "name"),
    *("dtype", "device", "get_device", "layout", "is_sparse", "is_cuda", "is_cpu", "is_mps"),
    *("is_meta", "is_quantized", "is_complex", "is_floating_point", "is_inference", "_version"),
    *("ndim", "dim", "ndimension", "itemsize", "element_size"),
    *("register_hook", "register_post_accumulate_grad_hook"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
}

_DROPPING = {
    inspect.unwrap(function).__code__
    for function in (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad)
}


def is_dropping_gradients(frame: FrameType | None) -> bool:
    """Whether `frame` runs within torch's `zero_grad`."""
    while frame is not None and frame.f_code not in _DROPPING:
        frame = frame.f_back
    return frame is not None


def ignoring_classes() -> Any:
    """Return a context in which torch ignores subclasses of tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def add_first_post_hook(
    optimizer: torch.optim.Optimizer, hook: Callable[..., None]
) -> Callable[[], None]:
    """Run `hook` after each step, before all other hooks; return its remover."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle.remove


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile returned `module`."""
    return hasattr(module, "_orig_mod")


def without_compile(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return name and module; of a module that torch.compile returned, names of the original."""
    original: Any = getattr(module, "_orig_mod", None)
    return (name, module) if original is None else (f"{name}._orig_mod", original)


def compiled_calls(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Return what owns attributes that undo torch.compile of `module`, and them; perhaps none.

    It may have returned the module, or compiled its calls or methods of its class.
    """
    if is_compiled(module):
        original: Any = module._orig_mod
        return module, {"forward": lambda *args, **kwargs: original(*args, **kwargs)}
    if module._compiled_call_impl is not None:
        return module, {"_compiled_call_impl": None}
    members = (item for base in reversed(type(module).__mro__) for item in vars(base).items())
    originals = ((name, getattr(one, "_torchdynamo_orig_callable", None)) for name, one in members)
    return type(module), {name: one for name, one in originals if one is not None}


def tracing_compiled() -> AbstractContextManager[None]:
    """Return a context in which torch.fx traces through functions that torch.compile returned."""
    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)


def has_spectral_norm(module: nn.Module) -> bool:
    """Whether a weight of `module` is divided by an estimate that forward improves."""
    hooks = (type(hook).__name__ for hook in module._forward_pre_hooks.values())
    return type(module).__name__ == "_SpectralNorm" or "SpectralNorm" in hooks


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_of_module(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that run with the module's forward and backward."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()
    yield from module._backward_hooks.values()
    yield from module._backward_pre_hooks.values()


def global_hooks() -> Iterator[Any]:
    """Yield the hooks that run with every module."""
    for name, hooks in vars(nn.modules.module).items():
        if name.startswith("_global_") and isinstance(hooks, dict) and "always" not in name:
            yield from (hook for hook in hooks.values() if callable(hook))


def hooks_of_parameter(parameter: nn.Parameter) -> Iterator[Any]:
    """Yield the hooks that run when `parameter` gets its gradient."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        yield from (hooks or {}).values()


def search_in(tracer: fx.Tracer, modules: Iterable[ModuleType]) -> None:
    """Let the tracer find its wrapped functions in the globals of `modules` too."""
    tracer._autowrap_search.extend(modules)


def change_overflows(
    scaler: torch.amp.GradScaler,
    change: Callable[[Mapping[torch.device, Tensor]], dict[torch.device, Tensor]],
    inside: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    """Let `change`, within `inside`, alter overflows that `scaler` finds; return an undo function.

    `unscale_` and the check for fused optimizers both call the method that is replaced here.
    """
    find_local = scaler._unscale_grads_

    def find(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        with inside():
            return change(find_local(*args, **kwargs))

    scaler.__dict__["_unscale_grads_"] = find
    return lambda: scaler.__dict__.pop("_unscale_grads_", None)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of collective calls in `group`, or in all ranks' group."""
    public = getattr(dist, "set_timeout", None)  # from torch 2.14, which deprecates the private one
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group or dist.group.WORLD)


def save_tensors(
    tensors: Mapping[str, Tensor],
    writer: Any,
    is_distributed: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Write `tensors`, together with the other ranks of `group` if distributed."""
    options: dict[str, Any] = {"storage_writer": writer, "process_group": group}
    if "no_dist" in inspect.signature(save).parameters:  # torch 2.6
        options["no_dist"] = not is_distributed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is unavailable")
        save(dict(tensors), **options)


def load_tensors(tensors: Mapping[str, Tensor], reader: Any) -> None:
    """Read `tensors` in place by `reader`, in this process alone."""
    if "no_dist" in inspect.signature(load).parameters:  # torch 2.6
        load(dict(tensors), storage_reader=reader, no_dist=True)
        return
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"  # older versions would run any code in the files
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            load_state_dict(dict(tensors), reader, no_dist=True)
    finally:
        os.environ.pop(_SAFE)
        if before is not None:
            os.environ[_SAFE] = before


def clone_store() -> Any:
    """Return the default store, with a connection of its own if torch can clone it."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def break_group(group: dist.ProcessGroup) -> None:
    """Make all waits in a process group fail, in all threads of this process and on its peers.

    Gloo closes the connections of a group in which a wait has timed out.
    """
    with suppress(Exception):
        if torch.cuda.is_available():
            group._get_backend(torch.device("cuda")).abort()  # of NCCL
    with suppress(Exception):
        peer = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], peer, _LAST_TAG).wait(timedelta(milliseconds=1))

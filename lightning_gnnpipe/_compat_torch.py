"""Private names of torch that the package uses; `tests/test_compat.py` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.prune import BasePruningMethod
from torch.utils import _python_dispatch, _pytree, checkpoint

_LAST_TAG = 2**31 - 1  # no message uses it

BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
RUNNING_HOOK = "_current_fx_name"  # attribute of a LightningModule, which Lightning changes
DispatchMode = _python_dispatch.TorchDispatchMode
pytree = _pytree
INSTANCE_NORM: type[nn.Module] = nn.modules.instancenorm._InstanceNorm


def version_of(tensor: Tensor) -> int:
    """Return a number that each write to `tensor` changes; -1 if torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


class _NoCheckpoint:
    """Runs a reentrant checkpoint's function as it is."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)


NO_CHECKPOINT: tuple[Any, dict[str, Any]] = checkpoint, {"CheckpointFunction": _NoCheckpoint}


def fills_grad_of(accumulator: Any) -> bool:
    """Whether the running backward fills a leaf's `grad`; `accumulator` is its node."""
    return bool(torch._C._will_engine_execute_node(accumulator))


def node_of(tensor: Tensor) -> Any:
    """Return the node of autograd that `tensor` gets its gradient from; None if it needs none."""
    return get_gradient_edge(tensor).node if tensor.requires_grad else None


def leaves_behind(results: Iterable[Tensor], ends: Iterable[Any] = ()) -> list[Tensor]:
    """Return the leaves that get gradients of `results`, other than through the nodes `ends`."""
    known, new, leaves = {None, *ends}, [*map(node_of, results)], []
    while new:
        if (node := new.pop()) in known:
            continue
        known.add(node)
        new += [source for source, _ in node.next_functions]
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
    return leaves


def without_compile(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return name and module; of a module that torch.compile returned, names of the original."""
    original: Any = getattr(module, "_orig_mod", None)
    return (name, module) if original is None else (f"{name}._orig_mod", original)


def compiled_calls(module: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Return what owns attributes that undo torch.compile of `module`, and them; perhaps none.

    It may have returned the module, or compiled its calls or methods of its class.
    """
    if hasattr(module, "_orig_mod"):
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


def mask_weights(root: nn.Module) -> None:
    """Compute the weights that pruning masks as forward does, also of layers that do not run."""
    for module in root.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod):
                hook(module, ())


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` runs hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_in(owner: object) -> Iterator[Any]:
    """Yield hooks on forward and backward of a module, or of all modules: `nn.modules.module`.

    Hooks on PyG's steps of `propagate` are among them.
    """
    for name, hooks in vars(owner).items():
        if name[0] == "_" and name.endswith(("ward_hooks", "ward_pre_hooks")):
            yield from hooks.values()


def hooked_parameters(module: nn.Module) -> Iterator[str]:
    """Yield the names of parameters with hooks that run when they get their gradients."""
    for name, one in module.named_parameters():
        if one._backward_hooks or one._post_accumulate_grad_hooks:
            yield name


def search_in(tracer: fx.Tracer, modules: Iterable[ModuleType]) -> None:
    """Let the tracer find its wrapped functions in the globals of `modules` too."""
    tracer._autowrap_search.extend(modules)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of collective calls in `group`, or in all ranks' group."""
    public = getattr(dist, "set_timeout", None)  # from torch 2.14, which deprecates the private one
    (public or dist.distributed_c10d._set_pg_timeout)(timeout, group or dist.group.WORLD)


def default_store() -> Any:
    """Return the store of all ranks' group."""
    return dist.distributed_c10d._get_default_store()


def clone_store() -> Any:
    """Return the default store, with a connection of its own if torch can clone it."""
    store = default_store()
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

"""Finding the module to pipeline.

It is the smallest one that holds all message passing and has a forward of its own.
"""

from __future__ import annotations

from torch import nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.errors import ConfigError, UnsupportedError, explain
from lightning_gnnpipe.stages.listed import is_listed


def find_pipelined(module: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """Return the name and the module to pipeline; the name is empty for `module` itself.

    Args:
        module: The LightningModule.
        name: What the user named, or None to search.

    Raises:
        ConfigError: If there is no submodule of that name.
        UnsupportedError: If there is no message passing in it, or in several modules that nothing
            else calls.
    """
    if name is not None:
        try:
            chosen = module.get_submodule(name)
        except AttributeError as error:
            raise ConfigError(
                explain(
                    expected="'pipelined_module' to name a submodule of the LightningModule",
                    found=repr(name),
                    remedy=f"It has: {', '.join(child for child, _ in module.named_children())}.",
                )
            ) from error
        _check_passing(chosen)
        return name, chosen
    _check_passing(module)
    return _descend("", module)


def _descend(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    holders = _find_holders(module)
    if len(holders) == 1:
        child_name, child = holders[0]
        if not isinstance(child, MessagePassing):
            found = _descend(f"{name}.{child_name}" if name else child_name, child)
            if not _is_container(found[1]):
                return found
    if not name and not _has_forward(module):
        raise UnsupportedError(
            explain(
                expected="one submodule, or the LightningModule's own forward, to hold all "
                "message-passing layers that are trained",
                found=" and ".join(f"'{child}'" for child, _ in holders),
                remedy="Name one by GNNPipeStrategy(pipelined_module=...): all others run whole on "
                "each device. Or call them in the forward of the LightningModule, and that in "
                "training_step.",
            )
        )
    return name, module


def _find_holders(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the submodules that hold message passing; second names of another's are left out.

    Where nothing else calls several of them, those without trained weights are left out too: a
    teacher.
    """
    held = {
        (name, child): {id(m) for m in child.modules() if isinstance(m, MessagePassing)}
        for name, child in module.named_children()
        if _holds_passing(child)
    }
    holders = [
        (name, child)
        for (name, child), layers in held.items()
        if not any(_repeats(child, layers, other, all_) for (_, other), all_ in held.items())
    ]
    trained = [one for one in holders if any(p.requires_grad for p in one[1].parameters())]
    return trained if len(trained) == 1 and not _has_forward(module) else holders


def _repeats(child: nn.Module, layers: set[int], other: nn.Module, all_layers: set[int]) -> bool:
    """Whether `child` is a second name of layers that `other` holds and calls."""
    if child is other or _is_container(other) or not layers <= all_layers:
        return False
    return _is_container(child) or layers != all_layers or any(m is child for m in other.modules())


def _has_forward(module: nn.Module) -> bool:
    """Whether `module` can be called."""
    defined_in = type(module).forward.__module__.partition(".")[0]
    return defined_in not in ("torch", "lightning", "pytorch_lightning") or is_listed(module)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _holds_passing(module: nn.Module) -> bool:
    return any(isinstance(m, MessagePassing) for m in module.modules())


def _check_passing(module: nn.Module) -> None:
    if not _holds_passing(module):
        raise UnsupportedError(
            explain(
                expected="a module with message-passing layers (torch_geometric.nn.MessagePassing)",
                found=f"none in {type(module).__name__}",
                remedy="Build the layers in __init__; models without message passing need no "
                "pipeline over a graph.",
            )
        )

"""Finding the module to pipeline.

It is the smallest one that holds all message passing and has a forward of its own.
"""

from __future__ import annotations

from torch import nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.errors import ConfigError, UnsupportedError, explain


def find_pipelined(module: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """Return the name and the module to pipeline; the name is empty for `module` itself.

    Args:
        module: The LightningModule.
        name: What the user named, or None to search.

    Raises:
        ConfigError: If there is no submodule of that name.
        UnsupportedError: If there is no message passing in it.
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
    holders = {
        id(child): (child_name, child)
        for child_name, child in module.named_children()
        if _holds_passing(child)
    }
    if len(holders) == 1:
        child_name, child = next(iter(holders.values()))
        if not isinstance(child, MessagePassing):
            found = _descend(f"{name}.{child_name}" if name else child_name, child)
            if not _is_container(found[1]):
                return found
    return name, module


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


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

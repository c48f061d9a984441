"""Private names of PyG that the package uses; `tests/test_compat.py` lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import MessagePassing

# Attributes in which layers keep what they computed from the edges.
CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")

# Attributes of a layer that passes messages for all channels at once.
UNDECOMPOSED = {"_decomposed_layers": 1}

_HOOKS = ("_propagate_", "_message_", "_aggregate_", "_edge_update_")


def slices_of(batch: Batch, name: str) -> tuple[Tensor, Tensor | None] | None:
    """Return how PyG collated the attribute `name`: slices, and increments or None.

    Rows of each graph begin at slices, `[num_graphs + 1]`; increments, `[num_graphs, *]`, were
    added to values. None if the attribute is not of the graphs, or no tensor.
    """
    slices = getattr(batch, "_slice_dict", {}).get(name)
    increments = getattr(batch, "_inc_dict", {}).get(name)
    return (slices, increments) if isinstance(slices, Tensor) and slices.dim() == 1 else None


def arguments_of(method: str, conv: MessagePassing) -> tuple[str, ...]:
    """Return the names, like "x_j", that "propagate" or "edge_updater" of a layer reads."""
    return tuple(conv._user_args if method == "propagate" else conv._edge_user_args)


def arguments_of_update(conv: MessagePassing) -> tuple[str, ...]:
    """Return the names that `update` reads besides the aggregated messages."""
    return tuple(conv.inspector.get_param_names("update", exclude=conv.special_args))


def passing_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield hooks on the steps of `propagate`, if `module` passes messages."""
    if isinstance(module, MessagePassing):
        for name, hooks in vars(module).items():
            if name.startswith(_HOOKS):
                yield from hooks.values()


def method_of(module: nn.Module, name: str) -> Any:
    """Return the function of a method: of the class, but a PyG `Sequential` has one of its own.

    Its class has the function of the last `Sequential` that was made.
    """
    own = vars(module).get(name)
    return getattr(own, "__func__", None) or getattr(type(module), name)


def is_generated(file: str) -> bool:
    """Whether PyG wrote a file with this name: the `propagate` of a class."""
    return file.startswith("torch_geometric.") or "_propagate_" in file


def has_own_propagate(kind: type[MessagePassing]) -> bool:
    """Whether the user wrote `propagate`; PyG generates one for each class."""
    written = f"{kind.__module__}_{kind.__name__}_propagate"
    is_written = kind.propagate.__module__.startswith(written)
    return not is_written and kind.propagate is not MessagePassing.propagate


def multiplies_matrix(conv: MessagePassing) -> bool:
    """Whether PyG, not the user, wrote how `conv` multiplies by a sparse matrix."""
    return type(conv).message_and_aggregate.__module__.startswith("torch_geometric.")

"""Interception of `MessagePassing.propagate` and `edge_updater` on the instances of a model.

A layer runs on the rows of one chunk with a local `edge_index`; only what its messages read on the
source side (`name_j` in PyG's signature) must also hold the halo rows. The wrapped methods live in
the instance's `__dict__` for the time of a pass and are gone afterwards: the user's module is not
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from lightning_gnnpipe.passing.context import MessageContext
from lightning_gnnpipe.passing.normalize import localized

_CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")


def find_convs(module: nn.Module) -> dict[str, MessagePassing]:
    """Return the message-passing layers of `module` by name."""
    return {name: m for name, m in module.named_modules() if isinstance(m, MessagePassing)}


@contextmanager
def intercept(convs: Mapping[str, MessagePassing], context: MessageContext) -> Iterator[None]:
    """Let `convs` pass messages on the chunk that `context` says is running, within the block."""
    with ExitStack() as stack:
        stack.enter_context(without_caches(convs))
        stack.enter_context(localized(convs, context))
        for name, conv in convs.items():
            replaced: dict[str, Any] = {
                "propagate": _wrap(name, conv, "propagate", context),
                "edge_updater": _wrap(name, conv, "edge_updater", context),
            }
            stack.callback(_replace(conv, replaced))
        yield


@contextmanager
def without_caches(convs: Mapping[str, MessagePassing]) -> Iterator[None]:
    """Switch the layers' own caches off.

    They would hold the edges of whichever chunk, or sample, ran first.
    """
    with ExitStack() as stack:
        for conv in convs.values():
            if getattr(conv, "cached", False):
                empty = {cache: None for cache in _CACHES if hasattr(conv, cache)}
                stack.callback(_replace(conv, {"cached": False, **empty}))
        yield


def _replace(conv: MessagePassing, attributes: Mapping[str, Any]) -> Callable[[], None]:
    """Put `attributes` into the instance and return what puts the old ones back."""
    missing = object()
    before = {key: conv.__dict__.get(key, missing) for key in attributes}
    conv.__dict__.update(attributes)

    def restore() -> None:
        for key, value in before.items():
            if value is missing:
                conv.__dict__.pop(key, None)
            else:
                conv.__dict__[key] = value

    return restore


def _wrap(
    name: str, conv: MessagePassing, method: str, context: MessageContext
) -> Callable[..., Tensor]:
    original = getattr(conv, method)
    sources = _source_arguments(_read_by(conv, method))
    kept = sources & frozenset(_update_arguments(conv)) if method == "propagate" else frozenset()

    def run(edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        call = context.next_call(name)
        chunk = context.chunk
        wide = dict(kwargs)
        for argument in sources & kwargs.keys():
            wide[argument] = _widen(context, (name, call, argument), kwargs[argument], conv)
        size = (chunk.num_nodes + chunk.num_halo, chunk.num_nodes)
        context.is_passing = True
        try:
            with _update_sees(conv, {key: kwargs[key] for key in kept & kwargs.keys()}):
                return cast(Tensor, original(edge_index, size=size, **wide))
        finally:
            context.is_passing = False

    return run


def _read_by(conv: MessagePassing, method: str) -> tuple[str, ...]:
    return tuple(conv._user_args if method == "propagate" else conv._edge_user_args)


def _source_arguments(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name[:-2] for name in names if name.endswith("_j"))


def _update_arguments(conv: MessagePassing) -> list[str]:
    return list(conv.inspector.get_param_names("update", exclude=conv.special_args))


def _widen(
    context: MessageContext, key: tuple[str, int, str], value: Any, conv: MessagePassing
) -> Any:
    """Widen the source side of an argument: a tensor, or a (source, target) pair."""
    if isinstance(value, tuple | list):
        source, target = value
        return (None if source is None else context.widen(*key, source), target)
    if not isinstance(value, Tensor):
        return value
    wide = context.widen(*key, value)
    is_read_by_target = f"{key[2]}_i" in {*conv._user_args, *conv._edge_user_args}
    return (wide, value) if is_read_by_target else wide


@contextmanager
def _update_sees(conv: MessagePassing, rows: Mapping[str, Any]) -> Iterator[None]:
    """Give `update` its node-level arguments unwidened: it runs on the chunk's rows."""
    if not rows:
        yield
        return
    original = conv.update
    conv.__dict__["update"] = lambda out, **kwargs: original(out, **{**kwargs, **rows})
    try:
        yield
    finally:
        del conv.__dict__["update"]

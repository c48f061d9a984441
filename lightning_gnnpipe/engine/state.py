"""Weights and optimizer states of all stages, put together under the names of the user's module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe.comm import Mesh, Transport
from lightning_gnnpipe.engine.model import PipelinedModel

State = dict[str, Any]


def full_state_dict(root: nn.Module, model: PipelinedModel) -> dict[str, Tensor]:
    """Return the state dict of `root` with the weights of all stages, on every rank; collective.

    Args:
        root: The LightningModule.
        model: The pipelined model.
    """
    state: dict[str, Tensor] = root.state_dict()
    model.complete(state, root)
    return state


def merge_optimizer_states(transport: Transport, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with the states of all stages, on every rank; collective.

    Parameters are numbered alike everywhere, and each rank has state for its own alone.
    """
    merged: dict[Any, Any] = {}
    for one in transport.all_gather_objects(own_optimizer_state(transport, state)):
        merged |= one
    return {**state, "state": {key: merged[key] for key in sorted(merged)}}


def own_state_dict(root: nn.Module, model: PipelinedModel, mesh: Mesh) -> State:
    """Return the part of the state dict of `root` that this rank writes; no two write the same.

    What belongs to no stage is the first one's; a stage's first rank writes, of the first
    replica. For the other arguments see `full_state_dict`.
    """
    if mesh.shard or mesh.replica:
        return {}
    named = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    owned, pipelined = model.owned, model.pipelined
    foreign = {id(named[name]) for name in pipelined - owned if name in named}
    own = {id(named[name]) for name in owned if name in named}
    state: State = root.state_dict(keep_vars=True)
    return {
        key: value.detach() if isinstance(value, Tensor) else value
        for key, value in state.items()
        if id(value) in own or (mesh.is_first and id(value) not in foreign)
    }


def own_optimizer_state(transport: Transport, state: State) -> State:
    """Return the optimizer's states that this rank writes: of parameters of no earlier rank.

    The ranks are those of a replica; each replica has all states.
    """
    kept = [set(keys) for keys in transport.all_gather_objects(list(state["state"]))]
    earlier = set().union(*kept[: transport.members.ranks.index(transport.world.rank)])
    return {key: value for key, value in state["state"].items() if key not in earlier}


def drop_foreign_states(optimizers: Iterable[Optimizer], model: PipelinedModel) -> None:
    """Forget optimizer states, loaded from a checkpoint, of parameters of other stages."""
    for parameter in model.husks():
        for optimizer in optimizers:
            optimizer.state.pop(parameter, None)

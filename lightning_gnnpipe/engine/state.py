"""Weights of all stages, put together under the names of the user's module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_gnnpipe.comm import Mesh
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

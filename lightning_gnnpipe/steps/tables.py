"""Tables of weights with one row per node, divided over the shards of their stage.

A shard keeps and updates the rows of its own nodes, of states too, in the order of its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_gnnpipe.calls import Call, Inputs, Kind
from lightning_gnnpipe.comm import Mesh, Transport
from lightning_gnnpipe.errors import Fallbacks
from lightning_gnnpipe.graph import ChunkPlan
from lightning_gnnpipe.steps.modes import Mode

LEAST_ROWS = 4096  # smaller tables are not worth the messages

# Optimizers that update each number by itself.
_BY_NUMBER = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)


class Tables:
    """The divided tables of a module by name, and the nodes of each shard.

    `candidates`: names of the parameters that are divided, or still may be.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, fallbacks: Fallbacks) -> None:
        self._find, self._mesh, self._fallbacks = module.get_parameter, mesh, fallbacks
        is_sharded = mesh.num_shards > 1 and mesh.num_replicas == 1
        named = module.named_parameters() if is_sharded else ()
        self.candidates = {name for name, p in named if p.dim() and p.size(0) >= LEAST_ROWS}
        self.names: frozenset[str] = frozenset()
        self.is_cut = False  # ranks have only the rows of their shard; says nothing without tables
        self._nodes: tuple[Tensor, ...] = ()
        self._plan: ChunkPlan | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def nodes(self) -> Tensor:
        """The nodes of this shard, in the order of its rows."""
        return self._nodes[self._mesh.shard]

    def parameters(self) -> list[nn.Parameter]:
        return [self._find(name) for name in sorted(self.names)]

    def choose(
        self,
        call: Call,
        inputs: Inputs,
        modes: Iterable[Mode],
        users: Mapping[str, set[int]],
        optimizers: Sequence[Optimizer],
    ) -> frozenset[str]:
        """Return the weights to divide: one of `users` (stages) reads them, by rows only.

        No table is divided if an optimizer may mix the numbers of a tensor, as a norm does.
        """
        is_by_number = bool(optimizers) and all(type(one) in _BY_NUMBER for one in optimizers)
        if not is_by_number or inputs.num_nodes < LEAST_ROWS:
            self.candidates = set()
        rows = {name for slot, name in call.weights.items() if inputs.kinds[slot] is Kind.NODE}
        rows = (rows & self.candidates).difference(*(mode.read_whole for mode in modes))
        self.candidates = {name for name in rows if len(users[name]) == 1}
        return frozenset(self.candidates)

    def begin(self, names: Collection[str], plan: ChunkPlan) -> None:
        """Divide tables as the nodes of `plan` are; they are cut later."""
        self.names, self.is_cut = frozenset(names), False
        self._plan, self._nodes = plan, _nodes_of(plan)

    def end(self, gather_states: Callable[[], None]) -> None:
        """Make all tables whole for the rest of the run; `gather_states` joins optimizer states."""
        gather_states()
        self.clear()
        self.candidates = set()
        self._fallbacks.tell(
            "A pass has other shards than training, or reads all rows of a table of weights",
            origin="the rows of its own nodes on each shard",
            to="the whole table on each shard",
        )

    def clear(self) -> None:
        """Forget the division, of whole tables."""
        self.names, self.is_cut, self._plan, self._nodes = frozenset(), False, None, ()

    def serve(self, plan: ChunkPlan, mode: Mode) -> bool:
        """Whether a pass reads tables by rows only, with nodes divided as in training."""
        if not self.names.isdisjoint(mode.read_whole):
            return False
        if plan is not self._plan:
            nodes = () if plan.shard is None else _nodes_of(plan)
            if len(nodes) != len(self._nodes) or not all(map(torch.equal, nodes, self._nodes)):
                return False
            self._plan = plan
        return True

    def rows(self, name: str, span: slice) -> Tensor:
        """Return rows `span` of this shard, without gradient."""
        table = self._find(name).detach()
        return table[span] if self.is_cut else table[self.nodes[span]]

    def as_now(self, name: str, grad: Tensor) -> Tensor:
        """Return the gradient of this shard's rows; among zeros while the table is whole."""
        if name not in self.names or self.is_cut:
            return grad
        whole = grad.new_zeros(self._find(name).shape)
        whole[self.nodes] = grad
        return whole

    def piece(self, whole: Tensor) -> Tensor:
        """Return a copy of the rows of this shard."""
        return whole[self.nodes.to(whole.device)]

    @property
    def sizes(self) -> list[int]:
        return [nodes.numel() for nodes in self._nodes]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the whole table from the rows of all shards."""
        whole = pieces[0].new_empty((sum(self.sizes), *pieces[0].shape[1:]))
        for nodes, piece in zip(self._nodes, pieces, strict=True):
            whole[nodes.to(whole.device)] = piece
        return whole

    def join_states(
        self, transport: Transport, optimizer: Optimizer, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a state dict of `optimizer` with the states of whole tables; collective."""
        ids = {id(one) for one in self.parameters()}
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        numbers = [number for number, p in enumerate(parameters) if id(p) in ids]
        if not numbers:
            return state
        own = {number: one for number, one in state["state"].items() if number in numbers}
        gathered = transport.all_gather_objects(apply_to_collection(own, Tensor, Tensor.cpu))
        joined = {
            number: self._join_state([one[number] for one in gathered if number in one])
            for number in own
        }
        return {**state, "state": state["state"] | joined}

    def _join_state(self, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        def join(several: Sequence[Any]) -> Any:
            sizes = [
                one.size(0) if isinstance(one, Tensor) and one.dim() else -1 for one in several
            ]
            if sizes == self.sizes:
                return self.join(several)
            return several[sizes.index(max(sizes))]  # user code may have made it whole on a rank

        return {key: join([one[key] for one in shards]) for key in shards[0]}

    def cut_state(self, state: dict[str, Any]) -> None:
        """Keep the rows of this shard of an optimizer state."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape[:1] == (sum(self.sizes),):
                state[key] = self.piece(value)


def _nodes_of(plan: ChunkPlan) -> tuple[Tensor, ...]:
    shard = plan.shard
    assert shard is not None
    return tuple(shard.nodes(index) for index in range(shard.num_shards))

"""States of optimizers: a rank has its stage's, and those of all stages when user code reads them.

While user code runs, another mapping stands in for `optimizer.state`. The first read through it
asks the other ranks. What it fetches stays until the next step of training or of the optimizer.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe.comm import Transport

State = dict[str, Any]
States = dict[Any, Any]


class OptimizerStates:
    """The states of an optimizer on several stages, by parameter.

    Args:
        optimizer: Its attribute `state` is replaced and put back.
        transport: The ranks.
        ask: Asks the other ranks to call `share`, and calls it; for a read by user code.
    """

    def __init__(self, optimizer: Optimizer, transport: Transport, ask: Callable[[], None]) -> None:
        self._optimizer, self._transport, self._ask = optimizer, transport, ask
        self._states: States = {}
        self._is_full = False
        self._has_foreign = True  # a checkpoint has those of all stages

    def hide(self) -> None:
        """Notice reads from now on."""
        self._find()
        if "state" in self._optimizer.__dict__:  # else it is computed
            self._optimizer.state = _SeenStates(self._read)  # type: ignore[assignment]

    def show(self) -> None:
        """Notice no reads from now on."""
        if isinstance(self._optimizer.state, _SeenStates):
            self._optimizer.state = self._states

    def settle(self, absent: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Forget the states of the parameters `absent`, those of other stages, if there may be any.

        Before the module is split there are none; all states stay until then.
        """
        states = self._find()
        if self._has_foreign:
            parameters = list(absent())
            for parameter in parameters:
                states.pop(parameter, None)
            self._is_full, self._has_foreign = False, not parameters

    def share(self, *, takes: bool) -> None:
        """Give the ranks that take them the states of all stages, until `settle`; collective."""
        states = self._find()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        own = {i: states[p] for i, p in enumerate(parameters) if states.get(p)}
        merged = merge_optimizer_states(self._transport, {"state": own})["state"]
        if takes:
            for i, found in merged.items():  # in the order of a single device
                parameter = parameters[i]
                mine = states.pop(parameter, None)
                states[parameter] = mine if i in own else _on_device(found, parameter)
            self._is_full = self._has_foreign = True

    def _find(self) -> States:
        """Return the true states; the user may have loaded whole ones since the last call."""
        states = self._optimizer.state
        if not isinstance(states, _SeenStates) and states is not self._states:
            self._states, self._is_full, self._has_foreign = states, False, True
        return self._states

    def _read(self) -> States:
        if not self._is_full:
            self._ask()
        return self._states


class _SeenStates(UserDict[Any, Any]):
    """Stands in for the states of an optimizer; each use of it is a read.

    Args:
        read: Returns the states of all stages.
    """

    def __init__(self, read: Callable[[], States]) -> None:
        self._read = read

    @property
    def data(self) -> States:  # type: ignore[override]
        return self._read()

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]  # which adds what is absent

    def __deepcopy__(self, memo: dict[int, Any]) -> States:
        return copy.deepcopy(self.data, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)


def _on_device(state: Any, parameter: nn.Parameter) -> Any:
    """Return a state of another rank with its tensors on this rank's device, or on the CPU."""

    def move(one: Tensor) -> Tensor:
        return one if one.device.type == "cpu" else one.to(parameter.device)

    return apply_to_collection(state, Tensor, move)


def merge_optimizer_states(transport: Transport, state: State) -> State:
    """Return an optimizer's state dict with the states of all stages, on every rank; collective.

    Parameters are numbered alike everywhere, and each rank has state for its own alone.
    """
    merged: dict[Any, Any] = {}
    for one in transport.all_gather_objects(own_optimizer_state(transport, state)):
        merged |= one
    return {**state, "state": {key: merged[key] for key in sorted(merged)}}


def own_optimizer_state(transport: Transport, state: State) -> State:
    """Return the optimizer's states that this rank writes: of parameters of no earlier rank.

    The ranks are those of a replica; each replica has all states.
    """
    kept = [set(keys) for keys in transport.all_gather_objects(list(state["state"]))]
    earlier = set().union(*kept[: transport.members.ranks.index(transport.world.rank)])
    return {key: value for key, value in state["state"].items() if key not in earlier}

"""States of optimizers: each rank has those of its stage, and user code reads those of all stages.

While user code runs, `WatchedStates` stands in for `optimizer.state`. The first read asks the other
ranks for their states. They stay until the next step of training or of the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, MutableMapping
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
        ask: Has all ranks call `gather`; called when user code reads a state.
    """

    def __init__(self, optimizer: Optimizer, transport: Transport, ask: Callable[[], None]) -> None:
        self._optimizer, self._transport, self._ask = optimizer, transport, ask
        self._states: States = {}
        self._is_full = False

    def watch(self) -> None:
        """Notice reads by user code from now on."""
        states = self._find()
        if "state" in self._optimizer.__dict__:  # a property cannot be watched
            self._optimizer.state = WatchedStates(states, self._read)  # type: ignore[assignment]

    def release(self) -> None:
        """Put the true states back, for code that knows of stages."""
        if isinstance(self._optimizer.state, WatchedStates):
            self._optimizer.state = self._find()  # type: ignore[assignment]

    def forget(self, foreign: Collection[nn.Parameter]) -> None:
        """Forget the states of `foreign`, the parameters of other stages."""
        states = self._find()
        for parameter in foreign:
            states.pop(parameter, None)
        self._is_full = self._is_full and not foreign

    def gather(self, *, keeps: bool, on_cpu: bool = False) -> None:
        """Send the states of this stage to all ranks, and receive the rest; collective.

        Call `forget` before, on all ranks.

        Args:
            keeps: Whether this rank keeps what it receives, until `forget`.
            on_cpu: Whether that stays on the CPU; else it moves to its parameter's device.
        """
        states = self._find()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        own = {i: states[p] for i, p in enumerate(parameters) if p in states}
        merged = merge_optimizer_states(self._transport, {"state": own})["state"]
        if not keeps:
            return
        for i, found in merged.items():  # in the order of a single device
            parameter = parameters[i]
            mine = states.pop(parameter, None)
            if i not in own:
                mine = found if on_cpu else _on_device(found, parameter)
            states[parameter] = mine
        self._is_full = True

    def _find(self) -> States:
        """Return the true states, which the user may have replaced, as `load_state_dict` does."""
        states: Any = self._optimizer.state
        if isinstance(states, WatchedStates):
            states = states.states
        if states is not self._states:
            self._states, self._is_full = states, False
        return self._states

    def _read(self) -> None:
        if not self._is_full:
            self._ask()


class WatchedStates(MutableMapping[Any, Any]):
    """Behaves as the dict of an optimizer's states; completes it before each use.

    Args:
        states: The dict.
        complete: Adds the states of other stages to it.
    """

    def __init__(self, states: States, complete: Callable[[], None]) -> None:
        self.states, self._complete = states, complete

    def all(self) -> States:
        """Return the states of all stages."""
        self._complete()
        return self.states

    def __getitem__(self, key: Any) -> Any:
        return self.all()[key]  # which adds what is absent

    def __setitem__(self, key: Any, value: Any) -> None:
        self.all()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.all()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def __contains__(self, key: Any) -> bool:
        return key in self.all()

    def __repr__(self) -> str:
        return repr(self.all())

    def __or__(self, other: Any) -> States:
        return self.all() | other

    def __ror__(self, other: Any) -> States:
        return other | self.all()

    def __ior__(self, other: Any) -> WatchedStates:
        self.all().update(other)
        return self

    def get(self, key: Any, default: Any = None) -> Any:
        return self.all().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self.all().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self.all().setdefault(key, default)

    def copy(self) -> States:
        return self.all().copy()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> States:
        return copy.deepcopy(self.all(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.all().__reduce_ex__(protocol)


def merge_optimizer_states(transport: Transport, state: State) -> State:
    """Return an optimizer's state dict with the states of all stages, on every rank; collective.

    Its tensors are on the CPU. Parameters are numbered alike everywhere, and each rank has state
    for its own alone.
    """
    own = apply_to_collection(own_optimizer_state(transport, state), Tensor, Tensor.cpu)
    merged: dict[Any, Any] = {}
    for one in transport.all_gather_objects(own):
        merged |= one
    keys = sorted(
        merged, key=lambda key: (isinstance(key, str), key)
    )  # an optimizer's own come last
    return {**state, "state": {key: merged[key] for key in keys}}


def own_optimizer_state(transport: Transport, state: State) -> State:
    """Return the optimizer's states that this rank writes: those that no earlier rank has.

    The ranks are those of a replica; each replica has all states.
    """
    kept = [set(keys) for keys in transport.all_gather_objects(list(state["state"]))]
    earlier = set().union(*kept[: transport.members.ranks.index(transport.world.rank)])
    return {key: value for key, value in state["state"].items() if key not in earlier}


def _on_device(state: State, parameter: nn.Parameter) -> State:
    """Return a state of another rank, brought to the device of its parameter, as torch does."""
    return {
        key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
        for key, value in state.items()
    }

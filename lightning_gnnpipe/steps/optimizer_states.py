"""Optimizer states: each rank holds its stage's, user code reads the states of all stages.

The first read fetches the states of other ranks, until the next training or optimizer step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.steps.tables import Tables

State = dict[str, Any]
States = dict[Any, Any]


class OptimizerStates:
    """States of one optimizer over stages; `ask` makes all ranks call `gather`."""

    def __init__(
        self, optimizer: Optimizer, transport: Transport, ask: Callable[[], None], tables: Tables
    ) -> None:
        self.optimizer, self._transport, self._ask = optimizer, transport, ask
        self._tables = tables
        self._states: States = {}
        self._is_full = False

    def watch(self) -> None:
        """Detect reads by user code from now on."""
        states = self._find()
        if "state" in self.optimizer.__dict__:  # a property cannot be watched
            self.optimizer.state = WatchedStates(states, self._read)  # type: ignore[assignment]

    def release(self) -> None:
        """Restore the plain states, for library code."""
        if isinstance(self.optimizer.state, WatchedStates):
            self.optimizer.state = self._find()  # type: ignore[assignment]

    def forget(self, foreign: Collection[nn.Parameter]) -> None:
        """Drop the states of `foreign`, parameters of other stages, and cut states of tables."""
        states = self._find()
        tables = self._tables.parameters() if self._tables.names else []
        for parameter in foreign:
            states.pop(parameter, None)
        for parameter in tables:
            self._tables.cut_state(states.get(parameter, {}))
        self._is_full = self._is_full and not foreign and not tables

    def gather(self, *, keeps: bool, on_cpu: bool = False) -> None:
        """Exchange the states of all stages, after `forget`; collective.

        With `keeps` received states stay, on the CPU (`on_cpu`) or their parameter's device.
        """
        states = self._find()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        own = {i: states[p] for i, p in enumerate(parameters) if p in states}
        joined = self._tables.join_states(self._transport, self.optimizer, {"state": own})
        merged = merge_optimizer_states(self._transport, joined)["state"]
        if not keeps:
            return
        for i, found in merged.items():  # in the order of a single device
            parameter = parameters[i]
            mine = states.pop(parameter, None)
            if i not in own or joined["state"][i] is not own[i]:
                mine = found if on_cpu and i not in own else _on_device(found, parameter)
            states[parameter] = mine
        self._is_full = True

    def _find(self) -> States:
        """Return the plain states; `load_state_dict` replaces the dict."""
        states: Any = self.optimizer.state
        if isinstance(states, WatchedStates):
            states = states.states
        if states is not self._states:
            self._states, self._is_full = states, False
        return self._states

    def _read(self) -> None:
        if not self._is_full:
            self._ask()


def _forwarded(name: str) -> Any:
    """Return method `name` of a dict of optimizer states, for `WatchedStates`."""

    def method(self: WatchedStates, *args: Any) -> Any:
        return getattr(self.all(), name)(*args)

    return method


class WatchedStates(MutableMapping[Any, Any]):
    """A dict of optimizer states; `complete` adds states of other stages before each use."""

    def __init__(self, states: States, complete: Callable[[], None]) -> None:
        self.states, self._complete = states, complete

    def all(self) -> States:
        """Return the states of all stages."""
        self._complete()
        return self.states

    __getitem__ = _forwarded("__getitem__")
    __setitem__ = _forwarded("__setitem__")
    __delitem__ = _forwarded("__delitem__")
    __contains__ = _forwarded("__contains__")
    __iter__ = _forwarded("__iter__")
    __len__ = _forwarded("__len__")
    __repr__ = _forwarded("__repr__")
    __reduce_ex__ = _forwarded("__reduce_ex__")
    get = _forwarded("get")
    pop = _forwarded("pop")
    setdefault = _forwarded("setdefault")
    copy = __copy__ = _forwarded("copy")

    def __or__(self, other: Any) -> States:
        return self.all() | other

    def __ror__(self, other: Any) -> States:
        return other | self.all()

    def __ior__(self, other: Any) -> WatchedStates:
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> States:
        return copy.deepcopy(self.all(), memo)


def merge_optimizer_states(transport: Transport, state: State) -> State:
    """Return the state dict of all stages, on the CPU of each rank; collective."""
    own = apply_to_collection(own_optimizer_state(transport, state), Tensor, Tensor.cpu)
    merged: dict[Any, Any] = {}
    for one in transport.all_gather_objects(own):
        merged |= one
    # String keys, an optimizer's own, come last.
    keys = sorted(merged, key=lambda key: (isinstance(key, str), key))
    return {**state, "state": {key: merged[key] for key in keys}}


def own_optimizer_state(transport: Transport, state: State) -> State:
    """Return the states that no earlier rank of the replica holds; collective."""
    kept = [set(keys) for keys in transport.all_gather_objects(list(state["state"]))]
    earlier = set().union(*kept[: transport.members.ranks.index(transport.world.rank)])
    return {key: value for key, value in state["state"].items() if key not in earlier}


def _on_device(state: State, parameter: nn.Parameter) -> State:
    """Move a received state to the device of its parameter, as torch does."""
    return {
        key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
        for key, value in state.items()
    }

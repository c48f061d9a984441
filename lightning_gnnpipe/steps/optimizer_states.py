"""States of optimizers. A rank has those of its stage; user code that reads them gets all.

While user code runs, another mapping stands in for `optimizer.state`. The first read through it
asks the other ranks. What it fetches stays until the next step of training or of the optimizer.
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
        ask: Asks the other ranks to call `share`, and calls it; for a read by user code.
    """

    def __init__(self, optimizer: Optimizer, transport: Transport, ask: Callable[[], None]) -> None:
        self._optimizer, self._transport, self._ask = optimizer, transport, ask
        self._states: States = {}
        self._is_full = False

    def hide(self) -> None:
        """Notice reads from now on."""
        states = self._find()
        if "state" in self._optimizer.__dict__:  # not a property, whose reads are not noticed
            self._optimizer.state = _SeenStates(states, self._read)  # type: ignore[assignment]

    def show(self) -> None:
        """Notice no reads from now on."""
        if isinstance(self._optimizer.state, _SeenStates):
            self._optimizer.state = self._find()  # type: ignore[assignment]

    def settle(self, foreign: Collection[nn.Parameter]) -> None:
        """Forget the states of `foreign`, the parameters of other stages, if there are any."""
        states = self._find()
        for parameter in foreign:
            states.pop(parameter, None)
        self._is_full = self._is_full and not foreign

    def share(self, *, takes: bool, brings: bool = True) -> None:
        """Give the ranks that take them the states of all stages; collective, after `settle`.

        Args:
            takes: Whether this rank takes them.
            brings: Whether they are brought to the device of their parameter; else to the CPU.
        """
        states = self._find()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        own = {i: states[p] for i, p in enumerate(parameters) if p in states}
        merged = merge_optimizer_states(self._transport, {"state": own})["state"]
        if not takes:
            return
        for i, found in merged.items():  # in the order of a single device
            parameter = parameters[i]
            mine = states.pop(parameter, None)
            if i not in own:
                mine = _on_device(found, parameter) if brings else found
            states[parameter] = mine
        self._is_full = True

    def _find(self) -> States:
        """Return the true states; the user may have put others in their place."""
        states: Any = self._optimizer.state
        if isinstance(states, _SeenStates):
            states = states.states
        if states is not self._states:
            self._states, self._is_full = states, False
        return self._states

    def _read(self) -> None:
        if not self._is_full:
            self._ask()


class _SeenStates(MutableMapping[Any, Any]):
    """Stands in for the states of an optimizer; each use of it is a read.

    Args:
        states: The true ones.
        read: Completes them.
    """

    def __init__(self, states: States, read: Callable[[], None]) -> None:
        self.states, self._read = states, read

    def all(self) -> States:
        """Return the states of all stages."""
        self._read()
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

    def __ior__(self, other: Any) -> _SeenStates:
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

"""Reads of whole weights, gradients and buffers by user code; a class of tensors detects them.

A rank that reads receives the tensors of other stages when all ranks meet, at the latest at the end
of a hook. They stay until the next training or optimizer step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe._compat_torch import (
    TENSOR_FLAGS,
    add_first_post_hook,
    ignoring_classes,
    is_dropping_gradients,
)
from lightning_gnnpipe.comm import Collectives, Transport
from lightning_gnnpipe.errors import UnsupportedError
from lightning_gnnpipe.steps.optimizer_states import OptimizerStates
from lightning_gnnpipe.steps.tables import Tables
from lightning_gnnpipe.steps.weights import StageWeights

_ASKS = "read weights of other stages"
_ASKS_STATES = "read optimizer states of other stages"

_SIZES = {"shape", "size", "numel", "nelement", "nbytes", "stride", "is_contiguous", "__len__"}
_GRADIENTS_OF = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


class WeightReads:
    """Serves reads of the tensors of a pipelined module and of its copies."""

    def __init__(
        self,
        transport: Transport,
        weights: Sequence[StageWeights],
        users: Callable[[], Mapping[str, set[int]]],
        tables: Tables,
    ) -> None:
        self._transport, self._weights, self._users = transport, weights, users
        self._tables = tables
        # Whether replicas may be at different places, so that none may wait for another.
        self.is_uneven: Callable[[], bool] = lambda: False
        # Whether an error may keep other ranks from answering.
        self.is_closed: Callable[[], bool] = lambda: False
        self.is_full = False  # tensors of other stages are here, since user code has read them
        self._is_inside = False
        self._seen = _make_classes(self)
        self._watched: dict[int, tuple[Tensor, type, str, StageWeights]] = {}  # by id
        self._states: list[OptimizerStates] = []

    def watch(self, *, is_full: bool = False) -> None:
        """Detect reads outside of `inside`; `is_full`: tensors of other stages are here."""
        self._show()
        self.is_full, self._watched = is_full, {}
        names = self._tables.names | self._tables.candidates
        if self._transport.mesh.num_stages > 1:
            names |= self._users().keys()
        elif not names:
            return
        for ranks in (self._transport, self._transport.everyone):
            ranks.answers |= dict.fromkeys((_ASKS, _ASKS_STATES), self._share)
        for weights in self._weights:
            for name, tensor in weights.named(names).items():
                if type(tensor) in self._seen:  # no subclass of a library
                    self._watched[id(tensor)] = tensor, type(tensor), name, weights

    def release(self) -> None:
        for ranks in (self._transport, self._transport.everyone):
            for asks in (_ASKS, _ASKS_STATES):
                ranks.answers.pop(asks, None)
        self._show()
        self.is_full, self._watched = False, {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let library code use this rank's own tensors within the block."""
        was_inside, self._is_inside = self._is_inside, True
        self._show()
        try:
            yield
        finally:
            self._is_inside = was_inside
            if not was_inside:
                self._hide()

    def settle(self) -> None:
        """Empty tensors of other stages, cut tables, and drop their optimizer states."""
        if self.is_full:
            with self.inside():
                for weights in self._weights:
                    weights.empty(self._users())
                self.is_full = False
        self.forget_foreign_states()

    def forget_foreign_states(self) -> None:
        """Drop optimizer states of other stages, and of rows of other shards."""
        if self._states:
            foreign = self._weights[0].foreign(self._users()).values()
            for states in self._states:
                states.forget(foreign)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [one.optimizer for one in self._states]

    def gather_states(self) -> None:
        """Copy optimizer states of all stages to every rank's CPU; collective."""
        with self.inside(), torch.no_grad():
            self.forget_foreign_states()
            for states in self._states:
                states.gather(keeps=True, on_cpu=True)

    def serve(self, optimizer: Optimizer) -> Callable[[], None]:
        """Let `optimizer` update only this stage's tensors; return an undo function."""

        def begin() -> None:
            self.settle()
            self._show()

        def before(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            values = inspect.signature(type(optimizer).step).bind(*args, **kwargs)
            closure = values.arguments.get("closure")
            if closure is None:
                begin()
                return args, kwargs

            num_calls = count(1)

            def run() -> Any:
                if next(num_calls) > 1:
                    refuse_evaluations(optimizer)
                loss = closure()
                begin()
                return loss

            values.arguments["closure"] = run
            return values.args, values.kwargs

        ask = partial(self._gather, _ASKS_STATES)
        states = OptimizerStates(optimizer, self._transport, ask, self._tables)
        self._states.append(states)
        served = ExitStack()
        served.callback(self._states.remove, states)
        served.callback(states.release)
        served.callback(optimizer.register_step_pre_hook(before).remove)
        served.callback(add_first_post_hook(optimizer, lambda *_: self._hide()))
        return served.close

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Wait for all ranks, answer their reads, and return each rank's `numbers`; collective."""
        with self._transport.meter.paused():
            return self._over.meet(place, numbers)

    def use(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run torch's `func` on watched tensors; first fetch them if it reads values."""
        is_field = func.__name__ in ("__get__", "__set__")
        name = func.__self__.__name__ if is_field else func.__name__
        is_plain = name in TENSOR_FLAGS
        if name == "grad" and is_field:
            is_dropped = func.__name__ == "__set__" and args[1] is None
            is_plain = is_dropped or is_dropping_gradients(inspect.currentframe())
        with ignoring_classes():
            if is_plain:
                return func(*args, **kwargs)
            if name in _SIZES:
                return func(*(self._in_size(one) for one in args), **kwargs)
        self.ask(func)
        return func(*args, **kwargs)

    def ask(self, func: Any = None) -> None:
        """Fetch the tensors of other stages; collective: other ranks ask or meet."""
        self._gather(_ASKS, func)
        self.is_full = True
        self._show()
        for states in self._states:
            states.watch()

    def _gather(self, asks: str, func: Any = None) -> None:
        if func in _GRADIENTS_OF or self.is_closed():
            found = "a read that other ranks cannot answer"
            remedy = "An error has ended the run: load the last checkpoint."
            if func in _GRADIENTS_OF:
                found = "a call for the gradients of some weights"
                remedy = "Call loss.backward(), then read p.grad of each weight."
            what = f"{'weights' if asks == _ASKS else 'optimizer states'} of pipelined layers"
            raise UnsupportedError(
                expected=f"{what} to be read in code that all ranks run",
                found=found,
                remedy=remedy,
            )
        with self._transport.meter.paused():
            places, _ = self._over.gather(asks)
            self._share(places, asks)

    @property
    def _over(self) -> Collectives:
        return self._transport if self.is_uneven() else self._transport.everyone

    def _share(self, places: Sequence[str], asks: str = "") -> None:
        """Send tensors to ranks that ask in `places`; keep received ones if this rank `asks`.

        With tables all ranks keep what one of them asks for.
        """
        own = self._transport.members.ranks
        places = places if self.is_uneven() else [places[rank] for rank in own]
        with self.inside(), torch.inference_mode(False), torch.no_grad():
            for weights in self._weights if _ASKS in places else ():
                tensors = weights.assemble(self._users())
                grads = weights.assemble_gradients(self._users())
                if asks == _ASKS or self._tables.candidates:
                    weights.take(tensors, grads)
            # Sums of gradients of tables need the same rows on all ranks.
            self.is_full |= _ASKS in places and bool(self._tables.candidates)
            if _ASKS_STATES in places:
                self.forget_foreign_states()
            for states in self._states if _ASKS_STATES in places else ():
                states.gather(keeps=asks == _ASKS_STATES)

    def _in_size(self, value: Any) -> Any:
        """Return a meta tensor of the full size for a tensor that is empty here."""
        if id(value) not in self._watched:
            return value
        _, _, name, weights = self._watched[id(value)]
        shape, dtype = weights.shape_of(name, value)
        return value if shape == value.shape else torch.empty(shape, dtype=dtype, device="meta")

    def _show(self) -> None:
        for tensor, kind, *_ in self._watched.values():
            tensor.__class__ = kind
        for states in self._states:
            states.release()

    def _hide(self) -> None:
        for tensor, kind, *_ in self._watched.values():
            tensor.__class__ = self._seen[kind]
        for states in self._states if self._watched else ():
            states.watch()


def refuse_evaluations(optimizer: Optimizer) -> NoReturn:
    """Refuse `optimizer`, which evaluates the loss several times per step."""
    raise UnsupportedError(
        expected="an optimizer that evaluates the loss once per step",
        found=f"{type(optimizer).__name__}, which evaluates it several times",
        remedy="Use Adam, AdamW or SGD.",
    )


def _make_classes(reads: WeightReads) -> dict[type, type]:
    """Return the classes of watched parameters and buffers; `reads` serves their reads."""

    class Seen:
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return reads.use(func, args, kwargs or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            reads.ask()
            return copy.deepcopy(self, memo)  # `ask` has restored its class

    class SeenParameter(Seen, nn.Parameter): ...

    class SeenBuffer(Seen, Tensor): ...

    return {nn.Parameter: SeenParameter, Tensor: SeenBuffer}

"""Inference on one mini-batch of graphs after another; the pipeline stays full.

The call for a batch returns when its outputs are complete. Stages that have finished the batch
start on the next one, whose arguments are predicted:

    call       0     0     1     1     2
    stage 0   b0    b1    b2     ...
    stage 1   .     b0    b1    b2     ...

The next batch and the last call predict them, without running user code: after net(batch.x) comes
net(following.x). This works for tensors and graphs that the step takes from the batch unchanged. If
the next call differs, the pass is completed, its outputs are dropped, and prediction stops until
the loop ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnnpipe._compat_torch import version_of
from lightning_gnnpipe.batches.batches import BatchPasses
from lightning_gnnpipe.calls import Call, Inputs, KnownKinds, find_graphs, flatten_call
from lightning_gnnpipe.chunks import Step, own_random_stream
from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import GNNPipeError
from lightning_gnnpipe.layers import intercept
from lightning_gnnpipe.schedule import Op, add_transfers, stream
from lightning_gnnpipe.steps import Mode, PipelinedModel, graph_of_node

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class BatchStream:
    """Runs calls without gradients, each on a mini-batch of graphs."""

    def __init__(
        self,
        model: PipelinedModel,
        transport: Transport,
        passes: BatchPasses,
        known_kinds: KnownKinds,
    ) -> None:
        self._model, self._transport, self._passes = model, transport, passes
        self._known_kinds = known_kinds
        self._batch: Any = None
        self._peek: Callable[[], Any] | None = None
        self._next: PredictedCall | None = None
        self._begun: tuple[PredictedCall, _Pass] | None = None
        self._state: Hashable = None  # of the module, when `_begun` was started
        self._has_come = True

    def enter_step(self, batch: Any, peek: Callable[[], Any]) -> None:
        """Set the batch of the user's step; `peek` returns the next batch, or None if unknown."""
        self._batch, self._peek = batch, peek

    def leave_step(self) -> None:
        """Forget the batch and `peek`."""
        self._batch = self._peek = None

    def look(self, call: Call, inputs: Inputs) -> int:
        """Check the prediction, predict the next call; return a number for ranks to compare."""
        if self._begun is not None:
            is_same = self._model.state_of(call, inputs) == self._state
            self._has_come = is_same and self._begun[0].matches(call)
        self._next = self._foresee(call) if self._has_come else None
        number = 0 if self._next is None else self._passes.identify(self._next.inputs)
        return 2 * number + self._has_come

    def _foresee(self, last: Call) -> PredictedCall | None:
        is_training = any(module.training for module in self._model.module.modules())
        following = None if is_training or self._peek is None else self._peek()
        if following is None:
            return None
        found = predict_call(self._batch, last.arguments, following)
        if found is None:
            return None
        try:
            module, known = self._model.module, self._model.matrices
            call = flatten_call(module, *found, method=last.method, matrices=known)
            call, inputs = find_graphs(call, graph_of_node(following), self._known_kinds)
        except GNNPipeError:  # the call itself will raise it
            return None
        return None if inputs.graphs is None else PredictedCall(call, inputs)

    def run(self, call: Call, inputs: Inputs) -> tuple[Mode, list[Tensor]]:
        """Return the outputs of `call`, each `[num_rows, *]`, on every rank; a collective call."""
        begun, self._begun = self._begun, None
        with self._transport.meter.paused():
            if begun is not None and not self._has_come:
                begun[1].drop()
                begun = None
            current = self._begin(call, inputs) if begun is None else begun[1]
            current.finish()
            num_sends = self._transport.num_sends
            if self._next is not None:
                following = self._begin(self._next.call, self._next.inputs)
                following.run_ahead()
                self._state = self._model.state_of(self._next.call, self._next.inputs)
                self._begun, self._next = (self._next, following), None
            return current.mode, current.collect(num_sends)

    def end(self) -> None:
        """Complete a pass that was started for a predicted call; a collective call."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with self._transport.meter.paused():
                begun[1].drop()
        self._has_come = True

    def _begin(self, call: Call, inputs: Inputs) -> _Pass:
        mode = self._passes.mode(call, inputs)
        spec = self._passes.open_pass(
            mode, call, inputs, is_training=False, codecs=get_codecs("fp32")
        )
        return _Pass(mode, Step(spec), self._model)


class _Pass:
    """One pass over a batch, run in pieces."""

    def __init__(self, mode: Mode, step: Step, model: PipelinedModel) -> None:
        self.mode, self._step, self._model = mode, step, model
        self._transport = step.spec.transport
        mesh, num_chunks = self._transport.mesh, step.spec.plan.num_chunks
        num_virtual = len(step.spec.stages)
        built = stream(len(mode.stages), [num_chunks], num_virtual=num_virtual)
        self._actions = list(add_transfers(built).forward(mesh.stage))
        last = mesh.num_stages - 1
        num_ahead = -(-num_chunks * (last - mesh.stage) // max(last, 1))
        computes = [i for i, action in enumerate(self._actions) if action.op is Op.F]
        later = (n for n, i in enumerate(computes) if self._actions[i].stage != mesh.stage)
        num_ahead = min(num_ahead, next(later, num_chunks))  # later stages wait for other ranks
        self._ahead = len(self._actions)
        if num_ahead < len(computes):
            self._ahead = computes[num_ahead] if num_ahead else 0
        self._num_done = 0

    def run_ahead(self) -> None:
        """Run the first micro-batches: fewer on later ranks, none on the last."""
        self._run(self._ahead)

    def finish(self) -> None:
        """Run the remaining actions; their sends may still be in flight."""
        self._run(len(self._actions))

    def collect(self, num_sends: int) -> list[Tensor]:
        """Return the outputs on every rank, after the oldest `num_sends` messages have left."""
        outputs = self._step.collect()
        self._transport.flush(num_sends)
        self._step.spec.inputs.release()
        return outputs

    def drop(self) -> None:
        """Run the remaining actions without collecting the outputs."""
        self.finish()
        self._transport.flush()

    def _run(self, end: int) -> None:
        spec = self._step.spec
        with (
            intercept(self._model.intercepted, spec.context),
            own_random_stream(spec.transport.world.device),
            torch.no_grad(),
        ):
            self._step.run(self._actions[self._num_done : end])
        self._num_done = max(self._num_done, end)


class PredictedCall:
    """A call expected next, with the present state of its tensors."""

    def __init__(self, call: Call, inputs: Inputs) -> None:
        self.call, self.inputs = call, inputs
        self._versions = [version_of(leaf) for leaf in call.leaves]
        # Copies where torch counts no writes (inference mode).
        marked = zip(call.leaves, self._versions, strict=True)
        self._copies = [leaf.clone() if version < 0 else None for leaf, version in marked]

    def matches(self, call: Call) -> bool:
        """Whether `call` has the same tensors, unchanged."""
        ours, known = self.call, zip(self._versions, self._copies, strict=True)
        facts = [(one.signature, one.counts, list(map(id, one.leaves))) for one in (ours, call)]
        return facts[0] == facts[1] and all(
            version_of(leaf) == version and (copy is None or torch.equal(copy, leaf))
            for leaf, (version, copy) in zip(call.leaves, known, strict=True)
        )


def predict_call(batch: Any, arguments: Arguments, following: Any) -> Arguments | None:
    """Return `arguments` with objects of `batch` replaced from `following`; None if unknown."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Data | Tensor):
            return places[id(value)]  # KeyError for any other tensor
        if isinstance(value, Mapping):
            return {key: replaced(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(replaced, value))
        is_count = type(value) is int and value == getattr(batch, "num_graphs", None)
        return following.num_graphs if is_count else value

    try:
        places = dict(_pairs(batch, following))
        return replaced(arguments)
    except (LookupError, AttributeError, TypeError):
        return None


def _pairs(value: Any, other: Any) -> Iterator[tuple[int, Any]]:
    """Yield the id of each graph and tensor in a batch, and what is there in another batch."""
    if isinstance(value, Data | Tensor):
        yield id(value), other
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Data | Mapping) and isinstance(other, Data | Mapping):
        items, known = (one if isinstance(one, Data) else one.items() for one in (value, other))
        there = dict(iter(known))
        pairs = [(item, there[key]) for key, item in items if key in there]
    elif isinstance(value, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(value, other, strict=False)
    for pair in pairs:
        yield from _pairs(*pair)

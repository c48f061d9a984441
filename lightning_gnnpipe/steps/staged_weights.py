"""Weights that only the ranks of their stages hold, with their optimizer states: weights="staged".

    step       a rank holds and updates the weights of its stage; other ranks hold empty tensors
    gathered   the first stage of each weight sends it to all; afterwards each keeps its own
    saving     weights and optimizer states are gathered
    end        both are whole on every rank

Weights that the head, other modules or arguments use are whole on every rank, as with "whole".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import UnsupportedError

log = logging.getLogger(__name__)


class StagedWeights:
    """The weights of one run that only their stages hold: none until `begin`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.root: nn.Module | None = None  # of all weights
        self._optimizers: Callable[[], Iterable[Optimizer]] = tuple
        self.stages: dict[nn.Parameter, tuple[int, ...]] = {}
        self._shapes: dict[nn.Parameter, torch.Size] = {}  # of those that are empty on some rank
        self._is_released = False

    def begin(self, root: nn.Module, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        """Keep the weights of `root` in stages from now on; `optimizers` returns the present."""
        self.root, self._optimizers = root, optimizers

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this rank keeps the weight."""
        stages = self.stages.get(parameter)
        return stages is None or self._transport.mesh.stage in stages

    def assign(self, stages: Mapping[nn.Parameter, set[int]]) -> None:
        """Note the stages of each weight, once; new ones have no optimizer state: refuse them."""
        if not self.stages:
            self.stages = {p: tuple(sorted(places)) for p, places in stages.items()}
            self._shapes = {p: p.shape for p in self.stages}
        for parameter, places in stages.items():
            if not places <= set(self.stages.get(parameter, places)):
                raise UnsupportedError(
                    expected="the same stages to use a weight in all modes, with weights='staged'",
                    found=f"a weight of shape {tuple(parameter.shape)} in stages {sorted(places)}",
                    remedy="Use GNNPipeStrategy(weights='whole').",
                )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have whole weights on every rank within the block; collective.

        Changes in place that all ranks make are kept: afterwards each rank has its stage's weights.
        """
        if not self._is_released and self.stages:  # within another block
            yield
            return
        self._gather()
        try:
            yield
        finally:
            self._release()

    def check_whole(self) -> None:
        """Refuse a call of the module on this rank alone while weights are in stages."""
        if self._is_released:
            raise UnsupportedError(
                expected="whole weights for a call of the module outside of training and "
                "evaluation steps",
                found="weights='staged', with which a rank holds the weights of its own stage",
                remedy="Write `with self.trainer.strategy.gathered():` around the call, on all "
                "ranks, or use GNNPipeStrategy(weights='whole').",
            )

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale gradients so that their norm over all stages is at most `clip_val`; collective."""
        grads = {p: p.grad for p in _params_of(optimizer) if p.grad is not None}
        norms = (torch.linalg.vector_norm(g).item() for p, g in grads.items() if self._counts(p))
        total = torch.tensor(sum(norm**2 for norm in norms), dtype=torch.float64)
        with self._transport.meter.paused():
            self._transport.pipe.all_reduce(total, "control")
        factor = min(clip_val / (total.sqrt().item() + 1e-6), 1.0)
        for grad in grads.values():
            grad.mul_(factor)

    def whole_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the `state` of `optimizer` with all stages' states on the first rank; collective.

        States of other ranks are on the CPU.
        """
        if not self.stages:
            return state
        held = state["state"]
        sent: dict[int, dict[str, Any]] = {}
        for i, p in enumerate(_params_of(optimizer)):
            if self._counts(p) and self._transport.mesh.shard == 0 and i in held:
                values = held[i].items()
                sent[i] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in values}
        for part in self._transport.gather_objects(sent):
            held = part | held
        return {**state, "state": held}

    def drop_states(self) -> None:
        """Drop optimizer states of weights that this rank does not hold."""
        for parameter in self._absent:
            for optimizer in self._optimizers():
                optimizer.state.pop(parameter, None)

    def make_whole(self) -> None:
        """Give all ranks whole weights, and the first the optimizer states; collective."""
        if self._is_released:
            mesh = self._transport.mesh
            for optimizer in self._optimizers():
                state = self.whole_state(optimizer, optimizer.state_dict())
                if mesh.rank == mesh.rank_of(0, 0):
                    optimizer.load_state_dict(state)
            self._gather()

    def lose(self) -> None:
        """Fill weights of other stages with NaN: their ranks are gone."""
        lost = self._absent
        for parameter in lost:
            parameter.data = parameter.data.new_full(self._shapes[parameter], torch.nan)
        self._is_released = False
        if lost:
            log.error(
                "%d weights of other stages are lost with their ranks, and NaN in this process: "
                "load a checkpoint before you use the module.",
                len(lost),
            )

    @property
    def _absent(self) -> list[nn.Parameter]:
        """The weights that are empty on this rank now."""
        return [p for p in self.stages if self._is_released and not self.holds(p)]

    def _gather(self) -> None:
        if not self._is_released:
            return
        self._transport.meet("gather the weights of all stages")
        for parameter in self._absent:
            parameter.data = parameter.data.new_empty(self._shapes[parameter])
        tensors: dict[int, list[Tensor]] = {}
        for parameter, stages in self.stages.items():
            tensors.setdefault(stages[0], []).append(parameter.data)
        self._transport.share_of_stages(tensors)
        self._is_released = False

    def _release(self) -> None:
        self._is_released = bool(self.stages)
        for parameter in self._absent:
            parameter.data, parameter.grad = parameter.data.new_empty(0), None
        self.drop_states()

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this stage is the first to hold the weight."""
        return self._transport.mesh.stage == self.stages.get(parameter, (0,))[0]


def _params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]

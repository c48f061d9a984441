"""Weights that only the ranks of their stages hold, with their optimizer states: weights="staged".

    step       a rank holds and updates the weights of its stage; other ranks hold empty tensors
    gathered   the first stage of each weight sends it to all; afterwards each keeps its own
    saving     weights are gathered, optimizer states go to the first rank
    end        weights are whole on every rank, and optimizer states on the first

Weights that the head, other modules or arguments use are whole on every rank, as with "whole".
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import UnsupportedError

log = logging.getLogger(__name__)


class StagedWeights:
    """The weights of one run that only their stages hold; `optimizers` returns the present ones."""

    def __init__(
        self,
        root: nn.Module,
        transport: Transport,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self.root = root
        self._transport, self._optimizers = transport, optimizers
        self._stages: dict[nn.Parameter, tuple[int, ...]] = {}
        self._shapes: dict[nn.Parameter, torch.Size] = {}  # of those that are empty on some rank
        self._is_released = False

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._stages

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether this rank keeps the weight."""
        stages = self._stages.get(parameter)
        return stages is None or self._transport.mesh.stage in stages

    def assign(self, stages: Mapping[nn.Parameter, set[int]]) -> None:
        """Note the stages of each weight, once; new ones have no optimizer state: refuse them."""
        if not self._stages:
            self._stages = {p: tuple(sorted(places)) for p, places in stages.items()}
            self._shapes = {p: p.shape for p in self._stages}
        for parameter, places in stages.items():
            if not places <= set(self._stages.get(parameter, places)):
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
        if not self._is_released and self._stages:  # within another block
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
        params = [p for p in _params_of(optimizer) if p.grad is not None]
        total = torch.zeros((), dtype=torch.float64)
        for p in params:
            if self._counts(p) and p.grad is not None:
                total += torch.linalg.vector_norm(p.grad).double().cpu() ** 2
        with self._transport.meter.paused():
            self._transport.pipe.all_reduce(total, "control")
        factor = min(clip_val / (float(total.sqrt()) + 1e-6), 1.0)
        for p in params:
            assert p.grad is not None
            p.grad.mul_(factor)

    def whole_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the `state` of `optimizer` with all stages' states on the first rank; collective.

        States of other ranks are on the CPU.
        """
        params = _params_of(optimizer)
        own = {i: state["state"][i] for i, p in enumerate(params) if self._counts(p, state, i)}
        buffer = io.BytesIO()
        torch.save(own if self._transport.mesh.shard == 0 else {}, buffer)
        merged = dict(state["state"])
        for part in self._transport.gather_objects(buffer.getvalue())[1:]:
            merged |= torch.load(io.BytesIO(part), map_location="cpu", weights_only=False)
        return {**state, "state": merged}

    def drop_states(self) -> None:
        """Drop optimizer states of weights that this rank does not hold."""
        for parameter in [p for p in self._stages if self._is_released and not self.holds(p)]:
            for optimizer in self._optimizers():
                optimizer.state.pop(parameter, None)

    def make_whole(self) -> None:
        """Give all ranks whole weights, and the first the optimizer states; collective."""
        if self._is_released:
            for optimizer in self._optimizers():
                state = self.whole_state(optimizer, optimizer.state_dict())
                if self._transport.mesh.rank == self._transport.mesh.rank_of(0, 0):
                    optimizer.load_state_dict(state)
            self._gather()

    def lose(self) -> None:
        """Fill weights of other stages with NaN: their ranks are gone."""
        lost = [p for p in self._stages if self._is_released and not self.holds(p)]
        for parameter in lost:
            parameter.data = parameter.data.new_full(self._shapes[parameter], torch.nan)
        self._is_released = False
        if lost:
            log.error(
                "%d weights of other stages are lost with their ranks, and NaN in this process: "
                "load a checkpoint before you use the module.",
                len(lost),
            )

    def _gather(self) -> None:
        if not self._is_released:
            return
        transport, mesh = self._transport, self._transport.mesh
        transport.meet("gather the weights of all stages")
        groups: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for parameter, stages in self._stages.items():
            groups.setdefault((stages[0], parameter.dtype), []).append(parameter)
        for (stage, _), several in groups.items():
            if mesh.stage == stage:
                flat = torch.cat([p.detach().flatten() for p in several])
            else:
                size = sum(self._shapes[p].numel() for p in several)
                flat = several[0].new_empty(size, requires_grad=False)
            with transport.meter.paused():
                transport.pipe.broadcast(flat, mesh.rank_of(stage), "control")
            parts = torch.split(flat, [self._shapes[p].numel() for p in several])
            for parameter, part in zip(several, parts, strict=True):
                if not self.holds(parameter):
                    parameter.data = part.view(self._shapes[parameter])
        self._is_released = False

    def _release(self) -> None:
        for parameter in (p for p in self._stages if not self.holds(p)):
            parameter.data, parameter.grad = parameter.data.new_empty(0), None
        self._is_released = bool(self._stages)
        self.drop_states()

    def _counts(
        self, parameter: nn.Parameter, state: Mapping[str, Any] | None = None, index: int = 0
    ) -> bool:
        """Whether this stage is the first to hold the weight, and has a `state` of it."""
        is_first = self._transport.mesh.stage == self._stages.get(parameter, (0,))[0]
        return is_first and (state is None or index in state["state"])


def _params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]

"""Data parallelism as Lightning sees it: each replica trains on batches of its own.

    replica 0   stage 0  ->  stage 1          reads batches 0, 2, 4, ...
    replica 1   stage 0  ->  stage 1          reads batches 1, 3, 5, ...
                   |            |
              gradients, metrics: over the data axis

Samplers, gradients, buffers and reductions are those of Lightning's DDP, whose processes are the
replicas. The ranks of one replica see the same batch, loss and logged values, so with one replica
there is nothing to reduce.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_gnnpipe.trainer import _compat
from lightning_gnnpipe.trainer.checkpoints import PipeCheckpoints
from lightning_gnnpipe.trainer.loaders import SameLengthLoader


class PipeReplicas(PipeCheckpoints):
    """Gives each replica its batches, and puts together what they make of them."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return for samplers how many replicas there are, and which one this is."""
        num_replicas = self.options.data_parallel
        size = max(self.world_size // num_replicas, 1)
        return {"num_replicas": num_replicas, "rank": self.global_rank // size}

    def process_dataloader(self, dataloader: object) -> object:
        """Give workers of loaders random numbers by replica; watch that replicas stay in step.

        Raises:
            ConfigError: If replicas have different numbers of batches.
        """
        is_seeded = int(os.environ.get("PL_SEED_WORKERS", 0)) == 1
        replica: int = self.distributed_sampler_kwargs["rank"]
        if is_seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
        if self.options.data_parallel == 1 or self._predicts or self._is_dealt_out(dataloader):
            return dataloader
        return SameLengthLoader(dataloader, partial(self._everyone.meet, "compare loaders"))

    @property
    def _predicts(self) -> bool:
        """Whether replicas may have different numbers of batches: nothing is done over them."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.PREDICTING

    def _is_dealt_out(self, dataloader: object) -> bool:
        """Whether all replicas have as many batches, by the sampler that Lightning has put in."""
        if not isinstance(dataloader, DataLoader):
            return False
        is_plain = type(dataloader.batch_sampler) in (BatchSampler, type(None))
        sampler = dataloader.sampler
        if not is_plain or not isinstance(sampler, DistributedSampler):
            return False
        return sampler.num_replicas == self.options.data_parallel

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor` reduced over replicas, or over `group`; on one replica as it is."""
        if not isinstance(tensor, Tensor) or not self._has_peers:
            return tensor
        return self._pipe.asked.over(
            tensor, group, lambda here, over: _compat.reduce_over(here, over, reduce_op)
        )

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Return `tensor` of every replica, or of `group`, stacked; on one replica as it is."""
        if not self._has_peers:
            return tensor
        gather = super().all_gather
        return self._pipe.asked.over(
            tensor, group, lambda here, over: gather(here, over, sync_grads)
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients accumulate in each replica within the block, as under DDP's `no_sync`."""
        model = self.engine.model
        model.is_accumulating = True
        try:
            yield
        finally:
            model.is_accumulating = False

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the user's backward; gradients are averaged before `on_after_backward` is called."""
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        pipelined = {id(p) for p in self.engine.model.module.parameters()}
        self.engine.average(p for p in module.parameters() if id(p) not in pipelined)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._share_buffers()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self.engine.progress.is_uneven = self.options.data_parallel > 1

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Give all replicas the buffers of the first one, as DDP does before each step."""
        if self.options.data_parallel == 1:
            return
        with self.engine.model.reads.inside():
            self._share_all_buffers()

    def _share_all_buffers(self) -> None:
        assert self.lightning_module is not None
        model, over = self.engine.model, self._pipe.replicas
        named = model.module.named_buffers()
        foreign = {id(b) for name, b in named if name in model.pipelined - model.owned}
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.lightning_module.buffers():
            if id(buffer) not in foreign:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            over.broadcast(flat, over.members.ranks[0], "control")
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))

    def _gather_metrics(self) -> Callable[..., list[Tensor]] | None:
        """Return what gathers the state of a metric from all replicas; None if there is one."""
        if self.options.data_parallel == 1:
            return None
        asked = self._pipe.asked

        def gather(state: Tensor, group: Any | None = None) -> list[Tensor]:
            return asked.over(state, group, gather_all_tensors)

        return gather


Gather = Callable[..., list[Tensor]]


class PipelineMetrics:
    """The metrics of a module, told who else there is."""

    def __init__(self) -> None:
        self._metrics: list[tuple[Metric, Any, Any]] = []

    def attach(self, module: nn.Module, gather: Gather | None) -> None:
        """Let the metrics of `module` compute over replicas.

        Args:
            module: The module.
            gather: Returns a state of all replicas; None if there is one.
        """
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            before = metric.distributed_available_fn, metric.dist_sync_fn
            self._metrics.append((metric, *before))
            metric.distributed_available_fn = _never if gather is None else _always
            if metric.dist_sync_fn is None:
                metric.dist_sync_fn = gather

    def detach(self) -> None:
        """Give the metrics back as they were."""
        for metric, is_available, gather in self._metrics:
            metric.distributed_available_fn, metric.dist_sync_fn = is_available, gather
        self._metrics.clear()


def _never() -> bool:
    return False


def _always() -> bool:
    return True

"""Passes over a mini-batch of graphs: micro-batches of whole graphs, without histories.

    the user's batch -> graphs, by work -> micro-batches -> the stages, in turn -> rows put back

No plan is cached: batches differ from step to step.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_gnnpipe.calls import Call, Inputs
from lightning_gnnpipe.chunks import (
    BatchInputs,
    PassSpec,
    Step,
    StepCosts,
    measure_layers,
    own_random_stream,
)
from lightning_gnnpipe.codecs import Codecs, get_codecs
from lightning_gnnpipe.comm import Transport
from lightning_gnnpipe.errors import ConfigError, Fallbacks, UnsupportedError
from lightning_gnnpipe.graph import BatchPlan, plan_micro_batches
from lightning_gnnpipe.layers import (
    NativeContext,
    check_graph_batches,
    check_norms,
    intercept,
    uses_batch_statistics,
)
from lightning_gnnpipe.options import RunOptions
from lightning_gnnpipe.selfcheck import check_graphs, norms_without_batch
from lightning_gnnpipe.stages import Layers
from lightning_gnnpipe.steps import Mode, PassSeeds, PipelinedModel, TrainingPass

log = logging.getLogger(__name__)


def check_replicas(num_replicas: int) -> None:
    """Raise `UnsupportedError` for several replicas: on one graph all would train alike."""
    if num_replicas > 1:
        raise UnsupportedError(
            expected="batches of graphs for data_parallel",
            found=f"one graph, on which all {num_replicas} replicas would compute the same",
            remedy="Use data_parallel=1, and use the devices for more stages or shards.",
        )


class BatchPasses:
    """Prepares passes over mini-batches of graphs."""

    def __init__(
        self,
        model: PipelinedModel,
        transport: Transport,
        options: RunOptions,
        seeds: PassSeeds,
    ) -> None:
        self._model, self._transport = model, transport
        self._options, self._seeds = options, seeds
        self._fallbacks = Fallbacks(log, is_quiet=not transport.world.is_root)
        self._has_met_several = False  # graphs in a batch

    def identify(self, inputs: Inputs) -> int:
        """Return a hash of the batch's sizes, for ranks to compare."""
        assert inputs.graphs is not None
        sizes = (inputs.num_nodes, inputs.graphs.num_graphs, *inputs.edge_sizes)
        return hash(sizes) & ((1 << 62) - 1)

    def check(self) -> None:
        """Raise if there are several shards, or if `partition` names the chunk of each node."""
        check_graph_batches(self._transport.mesh.num_shards)
        if not isinstance(self._options.given.partition, str):
            raise ConfigError(
                expected="'partition' to be left out for batches of graphs",
                found="a tensor with the chunk of each node",
                remedy="Micro-batches hold whole graphs. Set num_chunks instead.",
            )

    def check_layers(self, layers: Layers, call: Call, inputs: Inputs, *, trains: bool) -> None:
        """Raise `UnsupportedError` if micro-batches would change the results of the module."""
        module, options = self._model.module, self._options
        in_parts = options.num_chunks > 1
        if in_parts:
            check_norms(module, norms_without_batch(layers))
            norms = self._model.intercepted.batch_norms
            used = [name for name, norm in norms.items() if uses_batch_statistics(norm)]
            if used:
                self._fallbacks.tell(
                    "BatchNorm ('%s') takes the statistics of each micro-batch of graphs, as of "
                    "each replica in DDP. Running statistics are updated once per step, from all "
                    "graphs.",
                    used[0],
                )
        if options.given.self_check:
            check_graphs(module, layers, call, inputs, in_parts=in_parts, with_gradients=trains)

    def plan(self, inputs: Inputs) -> BatchPlan:
        """Return `num_chunks` micro-batches, or one per graph with nodes if there are fewer."""
        assert inputs.graphs is not None
        num_chunks = self._options.num_chunks
        plan = plan_micro_batches(inputs.graphs.work(), inputs.graphs.sizes, num_chunks)
        self._has_met_several |= inputs.graphs.num_graphs > 1
        if num_chunks > 1 and not self._has_met_several:
            self._fallbacks.tell(
                "A batch of graphs holds one graph: it runs in one micro-batch, which overlaps "
                "with nothing. If it is your only graph, serve it by DataLoader([data], "
                "batch_size=None)."
            )
        elif plan.num_chunks < num_chunks and self._options.given.num_chunks != "auto":
            self._fallbacks.tell(
                "A batch of %s graphs with nodes runs in as many micro-batches, not num_chunks=%s.",
                plan.num_chunks,
                num_chunks,
            )
        return plan

    def mode(self, call: Call, inputs: Inputs) -> Mode:
        """Return the stages for these arguments."""

        def measure(layers: Layers) -> StepCosts:
            plan, histories = self.plan(inputs), self._options.given.histories
            return measure_layers(self._model.module, layers, plan, call, inputs, histories)

        return self._model.mode(call, inputs, measure, also_train=self._options.is_fitting)

    def training(self, mode: Mode, call: Call, inputs: Inputs, codecs: Codecs) -> TrainingPass:
        """Return the training pass over the batch."""
        spec = self._open(mode, call, inputs, is_training=True, codecs=codecs)
        return TrainingPass(spec, None, self._model, mode, is_exact=codecs.is_exact)

    def run_exact(self, mode: Mode, call: Call, inputs: Inputs) -> tuple[list[Tensor], bool]:
        """Return the outputs of a pass without gradients, `[num_rows, *]`, on every rank.

        Also returns whether this rank's layers have drawn random numbers.
        """
        with self._transport.meter.paused():
            codecs = get_codecs("fp32")
            spec = self._open(mode, call, inputs, is_training=False, codecs=codecs)
            with (
                intercept(self._model.intercepted, spec.context),
                own_random_stream(self._transport.world.device) as has_drawn,
                torch.no_grad(),
            ):
                return Step(spec).forward(), has_drawn()

    def _open(
        self, mode: Mode, call: Call, inputs: Inputs, *, is_training: bool, codecs: Codecs
    ) -> PassSpec:
        """Return the specification of a pass over the batch."""
        plan = self.plan(inputs)
        return PassSpec(
            stage=mode.stages[self._transport.mesh.stage],
            outputs=tuple(mode.layers.values[name] for name in mode.layers.outputs),
            plan=plan,
            order=range(plan.num_chunks),
            inputs=BatchInputs(call, inputs, plan),
            context=NativeContext(plan.num_chunks),
            transport=self._transport,
            seed_of=self._seeds.of_training() if is_training else None,
            is_training=is_training,
            recompute=self._options.given.recompute,
            codecs=codecs,
        )

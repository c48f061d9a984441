"""Forecast each layout of stages and shards from the same measured layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_gnnpipe.chunks import LayerCost, work_of
from lightning_gnnpipe.codecs import get_codecs
from lightning_gnnpipe.layers import find_layers
from lightning_gnnpipe.planning.measured import TRAINED, Measured, bytes_of
from lightning_gnnpipe.planning.pipeline_plan import LayoutForecast, StageForecast
from lightning_gnnpipe.planning.schedule_layout import LayoutWork, simulate_layout
from lightning_gnnpipe.planning.traffic import graph_parallel_bytes
from lightning_gnnpipe.stages import Stage, find_users, tied_bytes
from lightning_gnnpipe.steps.gradient_sums import group_tied

_MANY_ROWS = 2**10  # enough to neglect the fixed bytes of a message


class LayoutForecaster:
    """Forecasts one layout."""

    def __init__(self, measured: Measured, num_stages: int, num_shards: int) -> None:
        self._measured, self._num_shards = measured, num_shards
        self._stages = measured.cut(num_stages, num_shards)
        self._sizes = measured.split(num_shards)
        self._users = find_users(self._stages, measured.module)
        self._messages = measured.options.strategy.messages
        self._codecs = get_codecs(self._messages.cut_codec)
        self._halo_codecs = get_codecs(self._messages.halo_codec)

    def forecast(self) -> LayoutForecast:
        """Simulate a step, and add up its bytes and memory."""
        measured, options = self._measured, self._measured.options
        times = simulate_layout(self._work())
        outputs, num_ranks = measured.output_bytes, len(self._stages) * self._num_shards
        memory = max(stage.memory_bytes for stage in self.stages())
        memory += measured.batch_bytes + 2 * outputs
        sent = self._cut_bytes() + self._shard_bytes() + (num_ranks - 1) * outputs
        return LayoutForecast(
            num_stages=len(self._stages),
            num_shards=self._num_shards,
            step_s=times.step_s,
            bubble_frac=times.bubble_frac,
            step_bytes=sent + 2 * self._num_shards * self._tied_bytes(),
            memory_bytes=memory,
            fits=options.memory_gib is None or memory <= options.memory_gib * 2**30,
        )

    def stages(self) -> list[StageForecast]:
        """Forecast time and memory of each stage."""
        measured, found = self._measured, []
        node_frac = float(self._sizes.nodes.sum(0).max()) / measured.chunks.num_nodes
        for stage, weights in zip(self._stages, self._weights(), strict=True):
            costs = measured.costs.of(stage)
            found.append(
                StageForecast(
                    first_layer=stage.segments[0].index,
                    num_layers=len(stage.segments),
                    num_parameters=sum(p.numel() for p in weights),
                    compute_s=sum(cost.compute_s for cost in costs),
                    memory_bytes=TRAINED * bytes_of(weights)
                    + round(self._row_frac() * sum(cost.history_bytes for cost in costs))
                    + round(node_frac * self._activations(stage, costs)),
                )
            )
        return found

    def _work(self) -> LayoutWork:
        measured, stages, options = self._measured, self._stages, self._measured.options
        again = float(options.strategy.histories.recomputes)
        sizes, costs = self._sizes, [measured.costs.of(stage) for stage in stages]
        total = sum(work_of(chunk) for chunk in measured.chunks.chunks)
        work = (sizes.nodes + sizes.edges).amax(1) / total
        swapped = torch.maximum(sizes.sent, sizes.received).amax(1)
        forward_s = [sum(c.forward_s for c in one) for one in costs]
        ties = group_tied(measured.module, self._users)
        return LayoutWork(
            num_shards=self._num_shards,
            forward_s=forward_s,
            backward_s=[
                again * s + sum(c.backward_s for c in one)
                for s, one in zip(forward_s, costs, strict=True)
            ],
            halo_row_bytes=[sum(map(self._halo_row_bytes, one)) for one in costs],
            num_exchanges=[sum(cost.num_pushes for cost in one) for one in costs],
            cut_bytes=[self._sent(stage, False) for stage in stages[:-1]],
            cut_grad_bytes=[self._sent(stage, True) for stage in stages[:-1]],
            work_fracs=work.tolist(),
            halo_rows=swapped.tolist(),
            halo_peers=sizes.peers.amax(1).tolist(),
            weight_bytes=[bytes_of(weights) for weights in self._weights()],
            tied_bytes=self._tied_bytes(),
            num_ties=sum(len(stages) - 1 for stages, _ in ties),
            output_bytes=measured.output_bytes,
            loss_s=measured.loss_s,
            bytes_per_s=options.link.bytes_per_s,
            message_s=options.link.message_s,
            copied_bytes_per_s=measured.copied_bytes_per_s,
            waits_for_halo=not self._messages.is_async,
        )

    def _sent(self, stage: Stage, is_grad: bool) -> list[float]:
        """Return for each chunk the bytes over a stage's cut, on its busiest rank."""
        sizes = self._sizes
        parts = torch.maximum(_largest_frac(sizes.nodes), _largest_frac(sizes.edges)).tolist()
        return [part * self._bytes(stage, chunk, is_grad) for chunk, part in enumerate(parts)]

    def _cut_bytes(self) -> int:
        """Return the bytes of rows and gradients over all cuts."""
        return sum(
            self._bytes(stage, chunk, is_grad)
            for stage in self._stages[:-1]
            for chunk in range(self._measured.chunks.num_chunks)
            for is_grad in (False, True)
        )

    def _bytes(self, stage: Stage, chunk: int, is_grad: bool) -> int:
        measured = self._measured
        values = [measured.layers.values[name] for name in stage.sent]
        codec = self._codecs.grads if is_grad else self._codecs.rows
        return sum(
            codec.payload_bytes((measured.num_rows(one, chunk), *one.row_shape), one.dtype)
            for one in values
            if one.requires_grad or not is_grad
        )

    def _shard_bytes(self) -> int:
        """Return the bytes between shards: halo rows, and gradients of rows and weights."""
        measured = self._measured
        if self._num_shards == 1:
            return 0
        num_nodes = measured.chunks.num_nodes
        return graph_parallel_bytes(
            num_layers=1,
            replicas_per_node=int(self._sizes.received.sum()) / num_nodes,
            num_nodes=num_nodes,
            row_bytes=sum(map(self._halo_row_bytes, measured.costs.layers)),
            weight_bytes=bytes_of(measured.module.parameters()),
            num_shards=self._num_shards,
        )

    def _halo_row_bytes(self, cost: LayerCost) -> int:
        """Return the encoded bytes of a layer's row, mean of both directions; approximate."""
        shape = (_MANY_ROWS, cost.pushed_row_bytes // 4)
        num_bytes = sum(codec.payload_bytes(shape, torch.float32) for codec in self._halo_codecs)
        return num_bytes // (len(self._halo_codecs) * _MANY_ROWS)

    def _activations(self, stage: Stage, costs: Sequence[LayerCost]) -> int:
        """Return the bytes kept between forward and backward, of all shards."""
        measured = self._measured
        if not measured.options.strategy.histories.recomputes:
            return sum(cost.saved_bytes for cost in costs)
        values = [measured.layers.values[name] for name in stage.received]
        chunks = range(measured.chunks.num_chunks)
        return sum(v.row_bytes * measured.num_rows(v, chunk) for v in values for chunk in chunks)

    def _row_frac(self) -> float:
        """Return the history rows of the shard with the most, over the number of nodes."""
        is_disjoint = self._num_shards == 1 and self._measured.chunks.is_disjoint
        if is_disjoint and not find_layers(self._measured.module).sees_all_nodes:
            return 0.0  # disjoint chunks keep no histories
        rows = self._sizes.nodes.sum(0) + self._sizes.received.sum(0)
        return float(rows.max()) / self._measured.chunks.num_nodes

    def _tied_bytes(self) -> int:
        """Return the bytes of weights shared by stages, once for each stage but the first."""
        users, named = self._users, self._measured.module.named_parameters()
        return sum(tied_bytes([p]) * (len(users[n]) - 1) for n, p in named if n in users)

    def _weights(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each stage."""
        users, named = self._users, list(self._measured.module.named_parameters())
        return [[p for n, p in named if s.index in users.get(n, ())] for s in self._stages]


def _largest_frac(counts: Tensor) -> Tensor:
    """Return `[num_chunks]` the largest count in each row over its sum; 0 for empty rows."""
    return counts.amax(1).double() / counts.sum(1).clamp(min=1)

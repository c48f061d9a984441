"""Which stages x shards: chosen by measuring at the first call, when model and graph are known.

Rank 0 cuts the graph, times the layers on a few chunks and simulates a step of each layout, as
`gnnpipe plan` does; all ranks then take the fastest one that fits. Until then no rank has a place
in the mesh, and each holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from lightning_gnnpipe.comm import Link, Transport, measure_link
from lightning_gnnpipe.engine.costs import measure_copies, measure_layers
from lightning_gnnpipe.engine.graph import GraphCache
from lightning_gnnpipe.engine.inputs import PlannedInputs
from lightning_gnnpipe.engine.layouts import compare_layouts, possible_layouts
from lightning_gnnpipe.engine.measured import LayoutOptions, Measured
from lightning_gnnpipe.engine.model import PipelinedModel
from lightning_gnnpipe.engine.norms import stages_of_norms
from lightning_gnnpipe.engine.options import EngineOptions
from lightning_gnnpipe.engine.pipeline_plan import LayoutForecast, choose_layout
from lightning_gnnpipe.engine.switch import switched
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.graph import check_graph, plan_from_assignment
from lightning_gnnpipe.stages import Call, Inputs, Layers, find_users

log = logging.getLogger(__name__)

Layout = tuple[int, int]  # numbers of stages and shards


class LayoutChoice:
    """Settles the layout of the ranks.

    Args:
        transport: The ranks.
        model: The pipelined model, all of it on each rank.
        graphs: The graphs.
        options: See `EngineOptions`.
    """

    def __init__(
        self,
        transport: Transport,
        model: PipelinedModel,
        graphs: GraphCache,
        options: EngineOptions,
    ) -> None:
        self._transport, self._model = transport, model
        self._graphs, self._options = graphs, options
        self._preferred: Layout | None = None
        self.on_chosen: Callable[[str], None] = log.info  # is told what and why, on rank 0

    def prefer(self, layout: Layout) -> None:
        """Take this layout without a comparison, where it is possible."""
        self._preferred = layout

    def settle(self, call: Call, inputs: Inputs, graph: int) -> None:
        """Choose, and deal the ranks out; a collective call.

        Args:
            call: The arguments of the first call.
            inputs: Their kinds.
            graph: Fingerprint of the graph.

        Raises:
            ConfigError: If no layout is possible.
            GNNPipeError: If model or graph are refused.
        """
        check_graph(inputs.edge_index.cpu(), inputs.num_nodes)
        module, is_fitting = self._model.module, self._options.is_fitting
        with switched(module, module.training or is_fitting):  # the first call may be a validation
            layers = self._model.trace(call, inputs, also_train=is_fitting)
            possible = self._possible(layers, inputs)
            if self._preferred in possible:
                layout, why = self._preferred, "as before."
            elif len(possible) == 1:
                [layout], why = possible, "the only one possible."
            else:
                link = self._link()

                def compare() -> tuple[Layout, str]:
                    measured = self._measure(layers, call, inputs, graph, link)
                    return self._compare(measured, possible)

                layout, why = self._transport.run_on_first(compare)
        assert layout is not None
        self._transport.settle(layout)
        if self._transport.world.is_root:
            self.on_chosen("Layout {} x {} (stages x shards), {}".format(*layout, why))

    def _possible(self, layers: Layers, inputs: Inputs) -> list[Layout]:
        num_devices, num_layers = self._transport.world.size, len(layers.segments)
        possible = possible_layouts(
            self._model.module,
            num_devices=num_devices,
            num_layers=num_layers,
            num_nodes=inputs.num_nodes,
        )
        if not possible:
            raise ConfigError(
                explain(
                    expected=f"a way to deal {num_devices} devices out, at least one layer to each "
                    "stage and one node to each shard",
                    found=f"{num_layers} layers that can be cut apart and {inputs.num_nodes} nodes",
                    remedy="Train on fewer devices, or use a deeper model.",
                )
            )
        return possible

    def _link(self) -> Link:
        given = self._options.search.link_gbit_per_s
        return measure_link(self._transport) if given is None else Link.of(given)

    def _measure(
        self, layers: Layers, call: Call, inputs: Inputs, graph: int, link: Link
    ) -> Measured:
        """Cut the graph and time the layers; on rank 0."""
        options, graphs = self._options, self._graphs
        edge_index = inputs.edge_index.cpu()
        chunks = graphs.partitioner.chunks(graph, inputs)
        kept = graphs.partitioner.kept_edges(edge_index, chunks)
        plan = plan_from_assignment(edge_index, inputs.num_nodes, chunks, kept=kept)
        plan = plan.with_edge_sets(inputs.edge_sizes).to(self._transport.world.device)
        planned = PlannedInputs(plan)
        planned.load(call, inputs)
        costs = measure_layers(self._model.module, layers, plan, planned, graphs.histories)
        if options.balance == "measured":
            self._model.costs = costs
        return Measured(
            self._model.module,
            layers,
            costs,
            measure_copies(inputs.num_nodes, costs.layers, plan.perm.device),
            plan,
            edge_index if kept is None else edge_index[:, kept],
            partial(graphs.partitioner.shards, graph, inputs),
            sum(leaf.nbytes for leaf in call.leaves),
            0.0,  # the loss, which takes as long in all layouts
            LayoutOptions(
                options.balance,
                graphs.histories,
                options.messages,
                link,
                options.search.memory_gib,
                options.repeat_encoder,
            ),
        )

    def _compare(self, measured: Measured, possible: Sequence[Layout]) -> tuple[Layout, str]:
        """Return the best layout, and a text that says why; on rank 0."""
        usable = [one for one in possible if self._has_own_norms(measured, one)]
        made = compare_layouts(measured, usable or possible)
        layouts = [forecaster.forecast() for forecaster in made.values()]
        best = choose_layout(layouts)
        link, memory_gib = measured.options.link, measured.options.memory_gib
        fastest_first = sorted(layouts, key=lambda one: one.step_s)
        why = (
            f"predicted seconds a step: {', '.join(map(_describe, fastest_first))} (without loss "
            f"and optimizer; links of {link.gbit_per_s:.3g} Gbit/s, {link.message_s * 1e3:.2g} ms "
            "a message)."
        )
        if not best.fits:
            why += f" None fits into {memory_gib:g} GiB: this one needs least."
        return (best.num_stages, best.num_shards), why

    def _has_own_norms(self, measured: Measured, layout: Layout) -> bool:
        """Whether each norm with running statistics would be called by one stage."""
        users = find_users(measured.cut(*layout), measured.module)
        return not stages_of_norms(self._model.intercepted.norms, users)


def _describe(one: LayoutForecast) -> str:
    fits = "" if one.fits else f" (needs {one.memory_bytes / 2**30:.2f} GiB)"
    return f"{one.num_stages} x {one.num_shards} {one.step_s:.3g}{fits}"

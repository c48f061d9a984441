"""Forecast training from a LightningModule and its data, before any Trainer runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch_geometric.data.data import BaseData

from lightning_gnnpipe._compat_torch import without_compile
from lightning_gnnpipe.calls import classify, flatten_call
from lightning_gnnpipe.chunks import computing_with
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.graph import StoredGraph
from lightning_gnnpipe.layers import check_replicas
from lightning_gnnpipe.methods import PipelinedMethod, is_one_graph
from lightning_gnnpipe.options import RunOptions, StrategyOptions
from lightning_gnnpipe.planning.closed_forms import MESSAGE_S, Link, usual_link
from lightning_gnnpipe.planning.forecast import Forecaster, Target
from lightning_gnnpipe.planning.pipeline_plan import PipelinePlan
from lightning_gnnpipe.stages import (
    HeldTensors,
    as_written,
    find_pipelined,
    refuse_uncalled,
    switched,
)
from lightning_gnnpipe.steps import graph_of_node, num_nodes


class _Captured(Exception):
    """Carries a call of the pipelined method out of `training_step`."""


def plan_pipeline(
    module: pl.LightningModule,
    data: BaseData | pl.LightningDataModule | Iterable[Any],
    options: StrategyOptions,
    *,
    num_stages: int | None = None,
    num_shards: int | None = None,
    num_devices: int | None = None,
    link_gbit_per_s: float | None = None,
    message_us: float | None = None,
    memory_gib: float | None = None,
) -> PipelinePlan:
    """Return how `module` and `data` would be cut; see `GNNPipeStrategy.plan`."""
    if not isinstance(without_compile("", module)[1], pl.LightningModule):
        raise ConfigError(
            expected="a LightningModule, whose training_step calls the network",
            found=type(module).__name__,
            remedy="Write plan(module, data): the module that you give to Trainer.fit comes first.",
        )
    for name, value, remedy in (
        ("link_gbit_per_s", link_gbit_per_s, "10 is usual."),
        ("message_us", message_us, "Leave it out if you do not know it."),
        ("memory_gib", memory_gib, "Leave it out if there is no limit."),
        ("num_devices", num_devices, "Give the number of devices of all stages together."),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(expected=f"'{name}' to be positive", found=str(value), remedy=remedy)
    asked = None
    if num_devices is None:
        asked = 2 if num_stages is None else num_stages, num_shards or options.graph_parallel
        num_devices = asked[0] * asked[1]
    for name, value in (("num_stages", num_stages), ("num_shards", num_shards)):
        if asked is None and value is not None:
            raise ConfigError(
                expected=f"either '{name}' or 'num_devices'",
                found=f"both, {value} and {num_devices}",
                remedy=f"Leave out {name}: with num_devices, the plan chooses it.",
            )
    with as_written(module):
        found = find_pipelined(module, options.pipelined_module)
    _, pipelined, method = found
    batch = _first_batch(data)
    attached = PipelinedMethod(pipelined, method, lambda: True)
    with attached.watched(module) as outside:
        captured = _capture(module, attached, batch)
    if captured is None and outside:
        refuse_uncalled(module, found)
    if captured is None:
        raise ConfigError(
            expected=f"training_step to call {found.call}, which is planned for",
            found="a first step that calls no message passing",
            remedy="Plan with a training_step that begins with this call.",
        )
    args, kwargs = captured
    call = flatten_call(pipelined, args, kwargs, partial(num_nodes, batch), method)
    vector = call.batch_vector
    if vector is not None and graph_of_node(batch) is None and not vector.any():
        call = replace(call, is_one_graph=is_one_graph(pipelined, call))
    if not call.has_graphs:
        call = HeldTensors(pipelined).attach(call)
    inputs = classify(call)
    if inputs.graphs is not None:
        raise ConfigError(
            expected="one graph to plan for",
            found=f"a batch of {inputs.graphs.num_graphs} graphs",
            remedy="Serve a single graph by DataLoader([data], batch_size=None). For batches of "
            "graphs, the start of fit says what a step takes.",
        )
    message_s = MESSAGE_S if message_us is None else message_us / 1e6
    link = usual_link(is_gloo=inputs.edge_index.device.type == "cpu", message_s=message_s)
    if link_gbit_per_s is not None:
        link = Link.of(link_gbit_per_s, message_s)
    check_replicas(options.data_parallel)
    memory_gib = options.memory_gib if memory_gib is None else memory_gib
    if options.graph_parallel == 1:
        options = replace(options, memory_gib=memory_gib)
    mapped = None
    if isinstance(getattr(batch, "stored", None), StoredGraph):
        run = RunOptions(options, asked[0] if asked else num_devices)
        run.open(batch.stored)
        options = run.cut
        if options.partition is batch.stored.parts:
            mapped = batch.stored.places
    target = Target(
        module=pipelined,
        root=module,
        call=call,
        inputs=inputs,
        options=options,
        num_chunks=options.count_chunks(asked[0] if asked else num_devices, inputs.num_nodes),
        link=link,
        is_one_machine=link_gbit_per_s is None,
        memory_gib=memory_gib,
        mapped=mapped,
    )
    threads = _threads_of_one(num_devices)
    rank_zero_info("Timing the layers ...")
    with as_written(module), switched(pipelined, True), computing_with(threads):
        return Forecaster(target, asked).plan(num_devices)


def _threads_of_one(num_processes: int) -> int:
    """Return the threads that each of `num_processes` will have; see `divide_threads`."""
    number = torch.get_num_threads()
    return number if "OMP_NUM_THREADS" in os.environ else max(1, number // num_processes)


def _first_batch(data: BaseData | pl.LightningDataModule | Iterable[Any]) -> Any:
    if isinstance(data, str | Path):
        raise ConfigError(
            expected="a graph, or what serves it, to plan for",
            found=repr(str(data)),
            remedy=f"For a folder write plan(module, FullGraphDataModule({str(data)!r})).",
        )
    if isinstance(data, pl.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    return data if isinstance(data, BaseData) else next(iter(data))


def _capture(
    module: pl.LightningModule, method: PipelinedMethod, batch: Any
) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
    """Return the arguments of the first call of `method`; None if there is no call."""

    def stop(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> None:
        raise _Captured(args, kwargs)

    method.attach(stop)
    try:
        with as_written(module), switched(module, True), torch.enable_grad():
            module.training_step(batch, 0)
    except _Captured as captured:
        args, kwargs = captured.args
        return args, kwargs
    except (RuntimeError, AttributeError, TypeError) as error:
        if "trainer" not in str(error).lower():  # an error of the user's code
            raise
        raise ConfigError(
            expected="training_step to reach the pipelined module without a Trainer",
            found=f"{type(error).__name__}: {error}",
            remedy="Call the pipelined module before you use self.log or self.trainer.",
        ) from error
    finally:
        method.detach()
    return None

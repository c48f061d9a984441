"""Says beforehand what the strategy would do with a module, from a few steps on a part of its data.

a plain Trainer  ->  errors that have nothing to do with the strategy
the strategy     ->  refusals, exact steps, fallbacks
a plan           ->  stages, seconds per step
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from math import isclose
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch_geometric.data import Batch, Data, Dataset

from lightning_gnnpipe._compat_torch import is_compiled
from lightning_gnnpipe.datamodule import SingleGraphLoader
from lightning_gnnpipe.errors import ConfigError, GNNPipeError, first_line
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.planning import PipelinePlan, plan_pipeline
from lightning_gnnpipe.stages import find_pipelined
from lightning_gnnpipe.strategy import GNNPipeStrategy
from lightning_gnnpipe.trainer.random_state import random_state, set_random_state
from lightning_gnnpipe.trainer.refuse import refuse_import
from lightning_gnnpipe.user_code import at, line_of

_MOST_NODES = 2000  # of the part of a graph
_SEEDS = 100  # nodes of each mask
_EPOCHS, _BATCHES = 4, 2
_CPU = torch.device("cpu")
_OTHER = "pytorch_lightning"


def check(
    module: pl.LightningModule,
    data: Data | Dataset | pl.LightningDataModule | Any,
    *,
    strategy: GNNPipeStrategy | None = None,
    num_devices: int = 2,
) -> bool:
    """Print what the strategy would do with `module` and `data`; return whether it would train.

    Copies of the module train for a few steps on the CPU, in a plain Trainer and under the
    strategy, on a part of a large graph. Then it prints what would be pipelined, which steps would
    be exact and why, or the refusal with its remedy, the stages, and the seconds of a step.

    Args:
        module: The module to train.
        data: A graph, a data set of one, a data module, or a loader.
        strategy: Its options count; None for the default options.
        num_devices: Devices to plan for.
    """
    given: dict[str, Any] = {"datamodule": data}
    if not isinstance(data, pl.LightningDataModule):
        graph = data[0] if isinstance(data, Dataset) else data
        loader = SingleGraphLoader(graph) if isinstance(graph, Data) else data
        given = {"train_dataloaders": loader, "val_dataloaders": loader}
    return Preview(module, given, strategy, num_devices).run()


class Preview:
    """One check, of `Trainer.fit(module, **given)`; see `check`."""

    def __init__(
        self,
        module: Any,
        given: Mapping[str, Any],
        strategy: GNNPipeStrategy | None,
        num_devices: int,
        precision: Any = None,
    ) -> None:
        self._module, self._given, self._precision = module, given, precision
        self._options = StrategyOptions() if strategy is None else strategy.options
        self._num_devices = num_devices
        self._is_whole = isinstance(self._options.partition, Tensor)  # of all nodes
        self._random = random_state(_CPU)
        self._remark, self._advice = "", ""
        if strategy is None:
            self._advice = f" Write Trainer(devices={num_devices}, strategy=GNNPipeStrategy())."
        self._misfit: Exception | None = None  # of the devices

    def run(self) -> bool:
        """Print the findings; return whether the module would train under the strategy."""
        with _quiet() as notes:
            try:
                _expect_lightning(self._module)
                self._options.resolve_layout(self._num_devices)
                plain = self._run_plain()
                notes.clear()
                steps = self._run_in_chunks()
                if isinstance(self._misfit, GNNPipeError) and not steps.is_of_graphs:
                    raise self._misfit
            except GNNPipeError as error:
                _print(filter(None, ["Verdict: refused.", str(error), self._remark]))
                return False
            finally:
                set_random_state(self._random, _CPU)
        lines = [*self._findings(plain, steps), *notes, *_forecast(plain.plan)]
        _print([*lines, f"{_verdict(steps)}{self._advice}"])
        return True

    def _alone(self, **changes: Any) -> GNNPipeStrategy:
        """Return a strategy with the options, for one process."""
        alone = {"num_stages": "auto", "graph_parallel": 1, "data_parallel": 1}
        alone |= {"halo_codec": "fp32", "async_halo": False, "start_method": "popen"}
        options = replace(self._options, **{**alone, **changes})
        return GNNPipeStrategy(**{one.name: getattr(options, one.name) for one in fields(options)})

    def _run_plain(self) -> _Steps:
        try:
            return self._fit(SingleDeviceStrategy("cpu"), plans=True)
        except Exception as error:
            if not self._is_whole:  # it may not run on a part
                self._is_whole = True
                return self._run_plain()
            raise ConfigError(
                expected="a module that trains in a plain Trainer",
                found=words_of(error),
                remedy="Mend that first: it fails without the strategy as well.",
            ) from error

    def _run_in_chunks(self) -> _Steps:
        try:
            return self._fit(self._alone())
        except Exception as error:
            with suppress(Exception):  # it only decides on a remark; `error` is what is reported
                self._fit(self._alone(num_chunks=1, partition="metis"))
                self._remark = "With num_chunks=1 it trains, exactly; nothing overlaps then."
            if isinstance(error, GNNPipeError):
                raise
            raise ConfigError(
                expected="a module that trains under the strategy as in a plain Trainer",
                found=words_of(error),
                remedy="Please report it, with the smallest module that shows it.",
            ) from error

    def _fit(self, strategy: Strategy, *, plans: bool = False) -> _Steps:
        """Train a copy for a few steps."""
        steps = _Steps(self._plan if plans else None)
        move, parts = strategy.batch_to_device, dict[int, Any]()

        def move_part(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if id(batch) not in parts:
                parts[id(batch)] = batch if self._is_whole else _part_of(batch), batch
            part, _ = parts[id(batch)]
            if steps.whole is None:
                steps.whole, steps.is_part = batch, part is not batch
            return move(part, *args, **kwargs)

        vars(strategy)["batch_to_device"] = move_part
        set_random_state(self._random, _CPU)
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=1,
                strategy=strategy,
                precision=self._precision,
                max_epochs=_EPOCHS,
                limit_train_batches=_BATCHES,
                limit_val_batches=1,
                num_sanity_val_steps=0,
                callbacks=[steps],
                logger=DummyLogger(),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            try:
                module = copy.deepcopy(self._module)
            except Exception:  # it holds a file, for instance
                module = self._module
            trainer.fit(module, **self._given)
        return steps

    def _plan(self, module: pl.LightningModule, batch: Any) -> PipelinePlan | Exception:
        """Return a plan for the devices; else for one device, and note the error; or an error."""
        before, self._misfit = random_state(_CPU), None

        def plan(num_stages: int, num_shards: int) -> PipelinePlan:
            layout = {"num_stages": num_stages, "num_shards": num_shards}
            try:
                return plan_pipeline(module, batch, self._options, **layout)
            finally:
                set_random_state(before, _CPU)

        try:
            return plan(*self._options.resolve_layout(self._num_devices))
        except Exception as error:
            with suppress(Exception):  # the first error is the one to report
                alone = plan(1, 1)
                self._misfit = error
                return alone
            return error

    def _findings(self, plain: _Steps, steps: _Steps) -> Iterator[str]:
        name, pipelined, _ = find_pipelined(self._module, self._options.pipelined_module)
        names = [one for one, _ in self._module.named_parameters() if name]
        rest = sorted({one.partition(".")[0] for one in names if not one.startswith(f"{name}.")})
        part = " on a part of the graph" if steps.is_part else ""
        yield f"Plain Trainer{part}: losses {plain.format_losses()}."
        pairs = zip(plain.losses[:1], steps.losses[:1], strict=False)
        is_same = all(isclose(a, b, rel_tol=1e-3) for a, b in pairs)
        why = "" if is_same else " They may differ: dropout and the like are drawn differently."
        yield f"GNNPipeStrategy{part}: losses {steps.format_losses()}.{why}"
        yield (
            f"Pipelined: '{name or 'self'}', a {type(pipelined).__name__} with "
            f"{steps.num_layers} message-passing layers."
        )
        if rest:
            yield f"Whole on each device: {', '.join(rest)}."
        num_exact, num_steps = sum(steps.is_exact), len(steps.is_exact)
        if steps.is_of_graphs:
            yield "Exact: all steps. Micro-batches are whole graphs."
        else:
            yield (
                f"Exact: validation, test and predict, and {num_exact} of {num_steps} training "
                "steps here. The first step on an input always is."
            )
            yield f"Stale: {100 * steps.stale_frac:.0f} % of the rows read from other chunks."


class _Steps(pl.Callback):
    """Notes what training steps did; makes a plan before the first."""

    def __init__(self, plan: Callable[[pl.LightningModule, Any], Any] | None) -> None:
        self._make_plan = plan
        self.plan: Any = None
        self.whole: Any = None  # the first batch
        self.is_part = self.is_of_graphs = False
        self.losses: list[float] = []
        self.is_exact: list[bool] = []
        self.stale_frac = 0.0
        self.num_layers = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(trainer.strategy, GNNPipeStrategy):
            trainer.strategy.controls.records_staleness = True
        if self._make_plan is not None and self.plan is None:
            self.plan = self._make_plan(pl_module, self.whole if self.is_part else batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(float(loss))
        strategy = trainer.strategy
        if not isinstance(strategy, GNNPipeStrategy) or strategy.engine.last_step.record is None:
            return
        self.is_of_graphs = strategy.engine.graphs.trained is None
        self.num_layers = sum(strategy.engine.model.stage_layers)
        self.is_exact.append(strategy.engine.last_step.record.is_exact)
        reads = strategy.collect_staleness().values()
        if num_rows := sum(one.rows for one in reads):
            self.stale_frac = sum(one.stale_rows for one in reads) / num_rows

    def format_losses(self) -> str:
        """Return the first losses as text."""
        return " ".join(f"{loss:.4g}" for loss in self.losses[:_EPOCHS]) or "not returned"


def _part_of(batch: Any) -> Any:
    """Return a part of a large graph, with nodes of its masks; other batches as they are."""
    is_graph = isinstance(batch, Data) and "n_id" not in batch and batch.edge_index is not None
    num_nodes = int(batch.num_nodes or 0) if is_graph else 0
    if num_nodes <= 2 * _MOST_NODES or (isinstance(batch, Batch) and batch.num_graphs > 1):
        return batch
    values = [value for name, value in batch if batch.is_node_attr(name)]
    masks = [one.reshape(num_nodes, -1)[:, 0] for one in values if one.dtype == torch.bool]
    is_in = torch.zeros(num_nodes, dtype=torch.bool)
    for mask in masks:
        is_in[mask.nonzero()[:_SEEDS, 0]] = True
    is_in[:_SEEDS] = True
    seeds, (sources, targets) = is_in.nonzero()[:, 0], batch.edge_index
    is_in[sources[is_in[targets]]] = True
    is_in[seeds] = False
    near = is_in.nonzero()[: max(_MOST_NODES - seeds.numel(), 0), 0]
    part = batch.subgraph(torch.cat([seeds, near]).sort().values)
    if "ptr" in part:  # of a batch of one graph
        part.ptr = torch.tensor([0, part.num_nodes])
    return part


def _expect_lightning(module: Any) -> None:
    if any(kind.__module__.startswith(f"{_OTHER}.") for kind in type(module).__mro__):
        refuse_import("LightningModule")
    if is_compiled(module) or not isinstance(module, pl.LightningModule):
        kind = "one that torch.compile returned" if is_compiled(module) else type(module).__name__
        raise ConfigError(
            expected="a LightningModule",
            found=kind,
            remedy="Pass the LightningModule itself. Layers inside of it may be compiled.",
        )


def _forecast(plan: PipelinePlan | Exception | None) -> Iterator[str]:
    """Yield the stages and seconds of a plan, or why there is none."""
    if not isinstance(plan, PipelinePlan):
        yield f"No forecast: {words_of(plan) if plan else 'no training step'}."
        return
    for number, stage in enumerate(plan.stages):
        first, last = stage.first_layer, stage.first_layer + stage.num_layers - 1
        names = dict.fromkeys([plan.layer_names[first], plan.layer_names[last]])
        yield f"Stage {number}: {' .. '.join(names)} ({stage.num_layers} layers)."
    plain = "" if plan.plain_s is None else f"plain Trainer {plan.plain_s:.3f}, "
    yield (
        f"Seconds per step, on this CPU: {plain}one device under the strategy "
        f"{plan.one_device_s:.3f}, {len(plan.stages) * plan.num_shards} devices {plan.step_s:.3f}."
    )
    if plan.plain_s is not None:
        gain = plan.plain_s / plan.step_s
        text = f"{gain:.1f} times as fast" if gain >= 1 else f"none, {1 / gain:.1f} times as slow"
        yield f"Expected gain: {text} as a plain Trainer."
    yield from plan.advice


def _verdict(steps: _Steps) -> str:
    if steps.is_of_graphs or not all(steps.is_exact):
        return "Verdict: would be pipelined."
    return "Verdict: would train, but exactly in each step, so that nothing overlaps."


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join([*lines, ""]))
    sys.stdout.flush()


def words_of(error: Exception) -> str:
    """Return the type and first line of an error of the user's code, and where it stands."""
    return f"{type(error).__name__}: {first_line(error)}{at(line_of(error))}"


class _Texts(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(f"Note: {record.getMessage()}")


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Print no notes and warnings within the block; yield a list of the package's."""
    texts: list[str] = []
    own, handler = logging.getLogger(__package__), _Texts(texts)
    # A script that imports the other package has made it the one that speaks.
    names = ("lightning.pytorch", "lightning.fabric", _OTHER, "lightning_fabric")
    with warnings.catch_warnings(), ExitStack() as undo:
        warnings.simplefilter("ignore")
        undo.callback(own.removeHandler, handler)
        undo.callback(setattr, own, "propagate", own.propagate)
        own.addHandler(handler)
        own.propagate = False
        for one in map(logging.getLogger, names):
            undo.callback(one.setLevel, one.level)
            one.setLevel(logging.ERROR)
        yield texts

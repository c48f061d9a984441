"""From a LightningModule and its data to a forecast of training, before any Trainer runs."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch_geometric.data import Data, Dataset, InMemoryDataset

from lightning_gnnpipe.engine import ForecastOptions, PipelinePlan, forecast, switched
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.stages import classify, find_pipelined, take_apart

log = logging.getLogger(__name__)

_NUM_TIMED = 3


class _Captured(Exception):
    """Carries the arguments of the pipelined module out of `training_step`."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


def plan_pipeline(
    module: pl.LightningModule,
    data: Data | Dataset | pl.LightningDataModule,
    options: StrategyOptions,
    *,
    num_stages: int,
    link_gbit_per_s: float = 10.0,
) -> PipelinePlan:
    """Return how `module` and `data` would be cut and what a training step would take.

    Args:
        module: The module; its `training_step` runs up to its call of the pipelined module.
        data: A graph, a data set of one, or a data module.
        options: Of the strategy; the number of stages is given apart.
        num_stages: Stages, S.
        link_gbit_per_s: Speed of the link between two devices, in Gbit/s each way.

    Raises:
        ConfigError: If `training_step` cannot run outside of a Trainer.
        GNNPipeError: As training would.
    """
    if not 0 < link_gbit_per_s < float("inf"):
        raise ConfigError(
            explain(
                expected="'link_gbit_per_s' to be positive",
                found=str(link_gbit_per_s),
                remedy="10 is usual between machines.",
            )
        )
    name, pipelined = find_pipelined(module, options.pipelined_module)
    batch = _first_batch(data)
    args, kwargs = _capture(module, pipelined, batch)
    call = take_apart(pipelined, args, kwargs)
    inputs = classify(call)
    num_chunks = options.expect_num_chunks(num_stages)
    if options.num_chunks == "auto":
        num_chunks = min(num_chunks, inputs.num_nodes)
    with switched(pipelined, True):
        return forecast(
            pipelined,
            call,
            inputs,
            ForecastOptions(
                num_stages,
                num_chunks,
                options.partition,
                options.balance,
                options.histories,
                options.self_check,
                link_gbit_per_s,
            ),
            partial(_time_loss, module, name, batch),
        )


def _first_batch(data: Data | Dataset | pl.LightningDataModule) -> Any:
    if isinstance(data, pl.LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        return next(iter(data.train_dataloader()))
    return data[0] if isinstance(data, Dataset | InMemoryDataset) else data


def _capture(
    module: pl.LightningModule, pipelined: nn.Module, batch: Any
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    try:
        with _stopping(pipelined), switched(module, True), torch.no_grad():
            module.training_step(batch, 0)
    except _Captured as captured:
        return captured.arguments
    except (RuntimeError, AttributeError, TypeError) as error:
        raise ConfigError(
            explain(
                expected="training_step to reach the pipelined module without a Trainer",
                found=f"{type(error).__name__}: {error}",
                remedy="Call the module before self.log and self.trainer are used.",
            )
        ) from error
    raise ConfigError(
        explain(
            expected="training_step to call the pipelined module",
            found="none",
            remedy="Name another by GNNPipeStrategy(pipelined_module=...).",
        )
    )


def _time_loss(module: pl.LightningModule, name: str, batch: Any, output: Any) -> float:
    """Return the seconds that `training_step` and backward take around the pipelined module.

    Run on a copy of `module`, whose metrics are its own; 0 if that is not possible.
    """
    try:
        twin = copy.deepcopy(module)
        twin.get_submodule(name).__dict__["forward"] = lambda *args, **kwargs: output
        with torch.random.fork_rng(), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # `self.log` without a Trainer
            return median(_time_step(twin, batch) for _ in range(_NUM_TIMED))
    except Exception:  # the user's code, on outputs that are zeros
        log.debug("The loss could not be timed.", exc_info=True)
        return 0.0


def _time_step(module: pl.LightningModule, batch: Any) -> float:
    own = copy.copy(batch)
    _synchronize()
    start = time.perf_counter()
    result: Any = module.training_step(own, 0)
    loss = result["loss"] if isinstance(result, Mapping) else result
    loss.backward()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _stopping(pipelined: nn.Module) -> Iterator[None]:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise _Captured(args, kwargs)

    pipelined.__dict__["forward"] = stop
    try:
        yield
    finally:
        del pipelined.__dict__["forward"]

"""`gnnpipe fit | validate | test | predict | plan --config run.yaml`, `gnnpipe check script.py`.

Further processes run the same command line: nothing here may depend on the first process.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning_utilities.core.imports import RequirementCache

import lightning_gnnpipe.models  # lets configs name its classes without the package
from lightning_gnnpipe.errors import ConfigError, Fallbacks, GNNPipeError
from lightning_gnnpipe.preview import Preview, words_of
from lightning_gnnpipe.strategy import GNNPipeStrategy

log = logging.getLogger(__name__)

REQUIREMENTS = ("jsonargparse[signatures]>=4.27.7", "rich")


class PlanningTrainer(pl.Trainer):
    """A Trainer that can forecast its training, for the command `plan`."""

    @rank_zero_only
    def plan(
        self,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None = None,
        link_gbit: float | None = None,
        message_us: float | None = None,
        memory_gib: float | None = None,
        num_devices: int | None = None,
    ) -> None:
        """Print how model and graph would be cut, and what a training step would take.

        Compares all layouts of the devices in stages and shards, and prints `num_stages` and
        `graph_parallel` of the best one, for the config.

        Args:
            model: The module to train.
            datamodule: Its data.
            link_gbit: Link speed of each device, in Gbit/s each way; default 10.
            message_us: Microseconds per message of any size; default: as measured for gloo while
                all cores compute.
            memory_gib: Memory of a device, in GiB, that a layout must fit into; default: no limit.
            num_devices: Plan the best layout of this many devices, instead of the Trainer's.

        Raises:
            ConfigError: If there are no data, or the strategy is not `GNNPipeStrategy`.
            GNNPipeError: As training would.
        """
        from rich.console import Console

        from lightning_gnnpipe.cli.plan_tables import print_plan

        strategy = self.strategy
        if not isinstance(strategy, GNNPipeStrategy):
            raise ConfigError(
                expected="'trainer.strategy' to be GNNPipeStrategy",
                found=type(strategy).__name__,
                remedy="Leave it out of the config, or set class_path: GNNPipeStrategy.",
            )
        if datamodule is None:
            raise ConfigError(
                expected="'data' to name a LightningDataModule",
                found="none",
                remedy="For a graph or a data set, use FullGraphDataModule.",
            )
        num_stages = num_shards = None
        if num_devices is None:
            num_stages, num_shards = strategy.options.resolve_layout(self.world_size)
        plan = strategy.plan(
            model,
            datamodule,
            num_stages=num_stages,
            num_shards=num_shards,
            num_devices=num_devices,
            link_gbit_per_s=link_gbit,
            message_us=message_us,
            memory_gib=memory_gib,
        )
        print_plan(plan, Console())


class _Raised(BaseException):
    """Carries an error past `except Exception`."""


class TransparentErrorParser(LightningArgumentParser):
    """Passes on, as `_Raised`, errors of the classes it builds; prints its own without usage.

    jsonargparse joins the errors of all members of a union into one `ValueError`, which hides
    whether an option was refused or had a wrong type.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print `message` without the usage page, and exit with status 2."""
        is_command = " [options]" in self.prog
        name = self.prog.replace(" [options]", "")
        listed = f"{name} --help" if is_command else f"{name} COMMAND --help"
        self.exit(2, f"{name}: {message}\nAll options: {listed}\n")

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Register `instantiator` for a class; its errors pass through jsonargparse."""

        @wraps(instantiator)  # jsonargparse reads the signature
        def build(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                raise _Raised(error) from None

        with warnings.catch_warnings():  # Lightning uses a function that is deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            super().add_instantiator(build, *args, **kwargs)


def _build(class_type: type, *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


class GNNPipeCLI(LightningCLI):
    """LightningCLI with the command `plan`."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's commands and `plan`, each with the arguments that a config sets."""
        return {**LightningCLI.subcommands(), "plan": {"model", "datamodule"}}

    def before_predict(self) -> None:
        """Save predictions, unless a callback of the config writes them."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(one, BasePredictionWriter) for one in callbacks):
            callbacks.append(SavePredictions())

    def instantiate_classes(self) -> None:
        self.parser.add_instantiator(_build, object, subclasses=True)
        try:
            super().instantiate_classes()
        except _Raised as raised:
            raise raised.args[0] from None


class SavePredictions(BasePredictionWriter):
    """Saves all outputs of `predict_step` to `predictions.pt`, in the folder of the logger.

    Without a logger: in `default_root_dir`. Each of several replicas adds its number to the name.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def write_on_epoch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        options = getattr(trainer.strategy, "options", None)
        num_replicas = 1 if options is None else options.data_parallel
        replica, place = divmod(trainer.global_rank, trainer.world_size // num_replicas)
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if place == 0:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"predictions{f'_{replica}' if num_replicas > 1 else ''}.pt"
            torch.save(predictions, path)
            sys.stdout.write(f"The predictions are in {path}.\n")


class SaveFitConfig(SaveConfigCallback):
    """Saves the config of a `fit` to the folder of its logger, once.

    Without a logger, to `default_root_dir`, where it never overwrites a config of another run.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not self._leaves_another(trainer):
            super().setup(trainer, pl_module, stage)

    def _leaves_another(self, trainer: pl.Trainer) -> bool:
        """Return whether an existing config is in the way, the root's answer on all ranks."""
        path = os.path.join(trainer.log_dir or ".", self.config_filename)
        is_there = trainer.is_global_zero and trainer.logger is None and os.path.isfile(path)
        if is_there and not self.already_saved:
            Fallbacks(log).tell(
                f"{path} exists and is kept",
                origin="saving the config of this run",
                to="not saving it",
            )
        return trainer.strategy.broadcast(is_there)


class _AtFit(BaseException):
    """Ends a script at its first `Trainer.fit`; carries whether the module would be trained."""


def check_script(script: str, arguments: Sequence[str], num_devices: int | None = None) -> bool:
    """Run a script up to its first `Trainer.fit`; print and return what `check` does.

    `num_devices`: None for the devices of the script's Trainer, or 2 if it has one.

    Raises:
        ConfigError: If the script does not come to it.
    """
    kinds: list[Any] = [pl.Trainer]
    if find_spec("pytorch_lightning"):
        kinds.append(import_module("pytorch_lightning").Trainer)
    names = ("train_dataloaders", "val_dataloaders", "datamodule")
    with ExitStack() as undo:

        def fit(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            undo.close()
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            given = {name: value for name, value in given.items() if name in names}
            own = trainer.strategy if isinstance(trainer.strategy, GNNPipeStrategy) else None
            number = num_devices or (trainer.world_size if trainer.world_size > 1 else 2)
            raise _AtFit(Preview(model, given, own, number, trainer.precision).run())

        for kind in kinds:
            undo.callback(setattr, kind, "fit", kind.fit)
            kind.fit = fit
        undo.callback(setattr, sys, "argv", sys.argv)
        sys.argv = [script, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        try:
            runpy.run_path(script, run_name="__main__")
            found = "its end"
        except _AtFit as end:
            return bool(end.args[0])
        except SystemExit as end:
            found = f"its end, with status {end.code}"
        except Exception as error:
            found = words_of(error)
    raise ConfigError(
        expected="a script that calls Trainer.fit",
        found=found,
        remedy="Run it without `gnnpipe check` first. It has to train a LightningModule.",
    )


def _check(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gnnpipe check",
        description="Say whether the strategy would train what a script trains, which is stopped "
        "at its first Trainer.fit. Status 0: it would. Status 1: it is refused.",
    )
    parser.add_argument("--num_devices", type=int, help="default: as in the script, or 2")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(arguments)
    return 0 if check_script(given.script, given.arguments, given.num_devices) else 1


def main() -> int:
    """Run the command of `sys.argv`; return its exit status."""
    sys.path.insert(0, os.getcwd())  # configs name classes in the user's files
    try:
        if sys.argv[1:2] == ["check"]:
            return _check(sys.argv[2:])
        _expect_packages()
        GNNPipeCLI(
            trainer_class=PlanningTrainer,
            trainer_defaults={"strategy": {"class_path": "lightning_gnnpipe.GNNPipeStrategy"}},
            save_config_callback=SaveFitConfig,
            parser_class=TransparentErrorParser,
            parser_kwargs={
                "description": "Train deep GNNs, their layers in a pipeline. First run "
                "`gnnpipe check script.py`: it says whether a script's module would be trained.",
                "version": lightning_gnnpipe.__version__,
            },
        )
    except (GNNPipeError, MisconfigurationException) as error:
        sys.stderr.write(f"gnnpipe: {error}\n")
        return 1
    return 0


def _expect_packages() -> None:
    for requirement in REQUIREMENTS:
        if not RequirementCache(requirement):
            raise ConfigError(
                expected=f"the package '{requirement}' to be installed",
                found="no such package",
                remedy='Run `pip install "lightning-gnnpipe[cli]"`.',
            )


if __name__ == "__main__":
    sys.exit(main())

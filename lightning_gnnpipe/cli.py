"""What the command `gnnpipe` does: plans a config, or prepares a folder."""

from __future__ import annotations

import sys
from argparse import ArgumentError
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from lightning_utilities.core.imports import RequirementCache

from lightning_gnnpipe import models  # noqa: F401 - lets configs name its classes without the package
from lightning_gnnpipe.datamodule import prepare_graph
from lightning_gnnpipe.errors import ConfigError, GNNPipeError
from lightning_gnnpipe.planning import PipelinePlan
from lightning_gnnpipe.strategy import GNNPipeStrategy

REQUIREMENT = "jsonargparse[signatures]>=4.27.7"
_FUNCTION = (
    "A function is known by the annotation of what it returns: write `def load_graph() -> Data:`, "
    "or `def make_net() -> torch.nn.Module:`."
)


def run(command: str, options: dict[str, Any]) -> int:
    """Print what a command makes, or an error; return the exit status."""
    try:
        if command == "plan":
            sys.stdout.write(f"{plan(**options)}\n")
        else:
            sys.stdout.write(f"{prepare_graph(**options)} is prepared.\n")
    except (GNNPipeError, MisconfigurationException) as error:
        sys.stderr.write(f"gnnpipe: {error}\n")
        return 1
    except ArgumentError as error:
        is_function = "does not correspond to a subclass" in str(error)
        hint = _FUNCTION if is_function else "Run `gnnpipe plan --help`."
        sys.stderr.write(f"gnnpipe: {error}\n{hint}\n")
        return 2
    return 0


def plan(link_gbit: float | None, num_devices: int | None, **options: Any) -> PipelinePlan:
    """Return the plan of the config that `sys.argv` names.

    Raises:
        ConfigError: If there are no data, or the strategy is not `GNNPipeStrategy`.
        GNNPipeError: As training would.
    """
    if not RequirementCache(REQUIREMENT):
        raise ConfigError(
            expected=f"the package '{REQUIREMENT}' to be installed",
            found="no such package",
            remedy='Run `pip install ".[cli]"` in the folder of this package.',
        )
    try:
        cli = LightningCLI(
            run=False,
            save_config_callback=None,
            trainer_defaults={"strategy": {"class_path": "lightning_gnnpipe.GNNPipeStrategy"}},
            parser_kwargs={"prog": "gnnpipe plan", "exit_on_error": False},
        )
    except ValueError as error:  # jsonargparse joins the errors of the classes that it builds
        raise ConfigError(
            expected="a config that can be built",
            found=str(error),
            remedy="Run `gnnpipe plan --help`.",
        ) from error
    strategy, data = cli.trainer.strategy, cli.datamodule
    if not isinstance(strategy, GNNPipeStrategy):
        raise ConfigError(
            expected="'trainer.strategy' to be GNNPipeStrategy",
            found=type(strategy).__name__,
            remedy="Leave it out of the config, or set class_path: GNNPipeStrategy.",
        )
    if data is None:
        raise ConfigError(
            expected="'data' to name a LightningDataModule",
            found="none",
            remedy="For a graph or a data set, use FullGraphDataModule.",
        )
    if num_devices is None:
        layout = strategy.options.resolve_layout(cli.trainer.world_size)
        options |= zip(("num_stages", "num_shards"), layout, strict=True)
    return strategy.plan(
        cli.model, data, link_gbit_per_s=link_gbit, num_devices=num_devices, **options
    )

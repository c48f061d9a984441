"""`gnnpipe plan --config run.yaml`: what a training step of a config would take.

`gnnpipe prepare arrays folder --num_chunks 16`: a folder for `FullGraphDataModule`.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning_utilities.core.imports import RequirementCache

import lightning_gnnpipe.models  # lets configs name its classes without the package
from lightning_gnnpipe.datamodule import prepare_graph
from lightning_gnnpipe.errors import ConfigError, GNNPipeError
from lightning_gnnpipe.planning import PipelinePlan
from lightning_gnnpipe.strategy import GNNPipeStrategy
from lightning_gnnpipe.types import PartitionMethod

REQUIREMENT = "jsonargparse[signatures]>=4.27.7"
_USAGE = """usage: gnnpipe plan --config run.yaml [options]
       gnnpipe prepare arrays folder --num_chunks 16
       gnnpipe plan --help
       gnnpipe --version
"""
_OPTIONS = {
    "num_devices": (int, "Plan the best layout of this many devices, not the Trainer's."),
    "link_gbit": (float, "Link speed of each device, in Gbit/s each way; default 10."),
    "message_us": (float, "Microseconds per message of any size; default: as measured for gloo."),
    "memory_gib": (float, "Memory of a device, in GiB, that a layout must fit into."),
}
_TRAINS = (
    "is not a command of gnnpipe, which does not train",
    "Write these lines to a file of your own and run `python FILE {0} --config run.yaml`:\n"
    "  import lightning_gnnpipe.models\n"
    "  from lightning.pytorch.cli import LightningCLI\n"
    "  LightningCLI()",
)
_REFUSED = dict.fromkeys(("fit", "validate", "test", "predict"), _TRAINS) | {
    "check": (
        "was removed",
        "Write print(GNNPipeStrategy().plan(module, loader)) in place of trainer.fit(module, "
        "loader): it prints what would be pipelined, or what is refused.",
    )
}


class PlanCLI(LightningCLI):
    """Builds what a config names; takes the options of a plan."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, (kind, text) in _OPTIONS.items():
            parser.add_argument(f"--{name}", type=kind, default=None, help=text)


def plan() -> PipelinePlan:
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
        cli = PlanCLI(
            run=False,
            save_config_callback=None,
            trainer_defaults={"strategy": {"class_path": "lightning_gnnpipe.GNNPipeStrategy"}},
            parser_kwargs={"prog": "gnnpipe plan", "description": plan.__doc__},
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
    asked = {name: cli.config[name] for name in _OPTIONS}
    asked["link_gbit_per_s"] = asked.pop("link_gbit")
    if asked["num_devices"] is None:
        layout = strategy.options.resolve_layout(cli.trainer.world_size)
        asked |= zip(("num_stages", "num_shards"), layout, strict=True)
    return strategy.plan(cli.model, data, **asked)


def prepare(arguments: Sequence[str]) -> str:
    """Write the folder that the command asks for; return what is printed."""
    parser = ArgumentParser("gnnpipe prepare", description=prepare_graph.__doc__)
    parser.add_argument("arrays", help="a folder of x.npy, edge_index.npy, y.npy, train_mask.npy")
    parser.add_argument("folder", help="the folder to write, for FullGraphDataModule")
    parser.add_argument("--num_chunks", type=int, required=True)
    parser.add_argument("--partition", choices=get_args(PartitionMethod), default="metis")
    parser.add_argument("--seed", type=int, default=0)
    asked = vars(parser.parse_args(arguments))
    return f"{prepare_graph(asked.pop('arrays'), **asked)} is prepared."


def main() -> int:
    """Run the command of `sys.argv`; return its exit status."""
    command = "".join(sys.argv[1:2])
    if command == "--version":
        sys.stdout.write(f"gnnpipe {lightning_gnnpipe.__version__}\n")
        return 0
    if command in ("--help", "-h"):
        sys.stdout.write(_USAGE)
        return 0
    if command not in ("plan", "prepare"):
        fact, remedy = _REFUSED.get(command, ("is not a command", "Run `gnnpipe plan --help`."))
        text = f"gnnpipe: '{command}' {fact}. {remedy.format(command)}\n"
        sys.stderr.write(text if command else _USAGE)
        return 2
    del sys.argv[1]
    sys.path.insert(0, os.getcwd())  # configs name classes in the user's files
    try:
        made = plan() if command == "plan" else prepare(sys.argv[1:])
        sys.stdout.write(f"{made}\n")
    except (GNNPipeError, MisconfigurationException) as error:
        sys.stderr.write(f"gnnpipe: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

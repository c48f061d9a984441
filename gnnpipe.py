"""The command `gnnpipe`: answers without importing torch what needs no plan."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version

_USAGE = """usage: gnnpipe plan --config run.yaml [options]
       gnnpipe prepare arrays folder --num_chunks 16
       gnnpipe plan --help
       gnnpipe --version

plan: what a training step of a config would take. prepare: write a graph into a folder.
"""
_OPTIONS = {
    "num_devices": (int, "Plan the best layout of this many devices, not the Trainer's."),
    "link_gbit": (float, "Gbit/s between machines; default: all devices are in this one."),
    "message_us": (float, "Microseconds per message of any size; default: as measured for gloo."),
    "memory_gib": (float, "Memory of a device, in GiB, that a layout must fit into."),
}
_OTHERS = """Model, data and Trainer are set as for LightningCLI, as in --trainer.devices 4.
`gnnpipe plan --config run.yaml --print_config` prints all that can be set, and
`gnnpipe plan --trainer.strategy.help=GNNPipeStrategy` the options of the strategy."""
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


def main() -> int:
    """Run the command of `sys.argv`; return its exit status."""
    command, *rest = sys.argv[1:] or [""]
    if command == "--version":
        sys.stdout.write(f"gnnpipe {version('lightning-gnnpipe')}\n")
        return 0
    if command in ("--help", "-h"):
        sys.stdout.write(_USAGE)
        return 0
    if command not in _PARSERS:
        fact, remedy = _REFUSED.get(command, ("is not a command", "Run `gnnpipe plan --help`."))
        text = f"gnnpipe: '{command}' {fact}. {remedy.format(command)}\n"
        sys.stderr.write(text if command else _USAGE)
        return 2
    parser = _PARSERS[command]()
    options, rest = parser.parse_known_args(rest)  # ends here with --help
    if command == "prepare" and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    sys.argv[1:] = rest  # for LightningCLI
    sys.path.insert(0, os.getcwd())  # configs name classes in the user's files
    from lightning_gnnpipe.cli import run

    return run(command, vars(options))


def _plan() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gnnpipe plan",
        description="What a training step of a config would take.",
        epilog=_OTHERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    return parser


def _prepare() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gnnpipe prepare", description="Write a graph into a folder for FullGraphDataModule."
    )
    parser.add_argument(
        "data",
        help="a folder of x.npy, edge_index.npy, y.npy, "
        "train_mask.npy, ...; without masks they are drawn",
    )
    parser.add_argument("folder", help="the folder to write")
    parser.add_argument("--num_chunks", type=int, required=True)
    parser.add_argument(
        "--partition", choices=("metis", "kaminpar", "random", "contiguous"), default="metis"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


_PARSERS = {"plan": _plan, "prepare": _prepare}


if __name__ == "__main__":
    sys.exit(main())

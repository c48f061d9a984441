"""Classify molecules by GIN, in mini-batches of whole graphs.

    python examples/molecules.py
    python examples/molecules.py --root DIR --dataset ogbg-molhiv --virtual-node
    python examples/molecules.py --layers 16 --stages 2 --micro-batches 4
    python examples/molecules.py --stages 2 --data-parallel 2

The synthetic molecules need no files; those of TUDataset (MUTAG, ENZYMES, PROTEINS) and ogbg-molhiv
are read from --root (or the folder that GNNPIPE_DATA names), or downloaded if there is none.
`--stages` puts the layers in a pipeline, `--data-parallel` trains several of them side by side.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread a process

import argparse

import lightning as L
import torch
from batches import build_parser, train_and_report
from molecule_sets import MoleculeSet, load_molecules
from quiet import silence_lightning

from lightning_gnnpipe.models import GIN, GraphClassifier


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    silence_lightning()
    molecules = load_molecules(options.dataset, options.root)
    train_and_report(
        f"GIN, {options.layers} layers of {options.hidden} channels, on {options.dataset}, "
        f"{options.epochs} epochs",
        build_module(molecules, options),
        (molecules.train, molecules.val, molecules.test),
        options,
    )


def parse_options() -> argparse.Namespace:
    parser = build_parser(__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--dataset", default="synthetic", help="synthetic, MUTAG, ENZYMES, PROTEINS, ogbg-molhiv")
    add("--layers", type=int, default=5, help="graph convolutions (default: 5)")
    add("--hidden", type=int, default=64, help="channels of each layer (default: 64)")
    add("--dropout", type=float, default=0.2, help="share that is zeroed (default: 0.2)")
    add("--virtual-node", action="store_true", help="one more node a graph, joined to all")
    add("--jk", choices=["cat", "max"], help="what joins the layers' outputs; default: the last")
    add("--pool", choices=["mean", "sum", "max"], default="mean")
    return parser.parse_args()


def build_module(molecules: MoleculeSet, options: argparse.Namespace) -> GraphClassifier:
    L.seed_everything(options.seed, verbose=False)
    net = GIN(
        molecules.atom_channels,
        options.hidden,
        molecules.num_classes,
        options.layers,
        options.dropout,
        edge_channels=molecules.bond_channels,
        virtual_node=options.virtual_node,
        jk=options.jk,
        pool=options.pool,
        norm=options.norm,
    )
    edges = () if molecules.bond_channels is None else ("edge_attr",)
    return GraphClassifier(
        net,
        molecules.num_classes,
        options.lr,
        inputs=("x", "edge_index", "batch", *edges),
        metric=molecules.metric,
    )


if __name__ == "__main__":
    main()

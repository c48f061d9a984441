"""Classify images as graphs of their patches by ViG, in mini-batches of whole graphs.

    python examples/vig_cifar.py
    python examples/vig_cifar.py --root DIR --dataset cifar10 --stages 2 --micro-batches 4

Trains on CIFAR-10 if it is below --root (or the folder that GNNPIPE_DATA names), and else on
scikit-learn's digits. `--model pixelvig` is the network that a study of pipelines for image graphs
trained: each pixel is a node, joined to those around it. `--stages` puts the blocks in a pipeline,
`--data-parallel` trains several of them side by side.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread a process

import argparse

import lightning as L
import torch
from batches import build_parser, train_and_report
from images import ImageGraphs, find_cifar10, load_images
from quiet import silence_lightning
from vig import PixelViG, ViG

from lightning_gnnpipe.models import GraphClassifier

PATCH = {"digits": 2, "cifar10": 4}
"""Rows and columns of a patch: 16 nodes an image of digits, 64 one of CIFAR-10."""


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    silence_lightning()
    graphs = load_graphs(options)
    train_and_report(
        f"{options.model}, {options.blocks} blocks, on {options.dataset}, {options.epochs} epochs",
        build_module(graphs[0], options),
        graphs,
        options,
    )


def parse_options() -> argparse.Namespace:
    parser = build_parser(__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--dataset", choices=PATCH, help="default: cifar10 if it is there, else digits")
    add("--images", type=int, default=5000, help="CIFAR-10's to train on (default: 5000)")
    add("--model", choices=["vig", "pixelvig"], default="vig")
    add("--blocks", type=int, default=8, help="blocks of the model (default: 8)")
    add("--hidden", type=int, default=96, help="channels of each block of vig (default: 96)")
    add("--conv", choices=["max_relative", "edge", "gin", "sage"], default="max_relative")
    options = parser.parse_args()
    if options.dataset is None:
        options.dataset = "cifar10" if find_cifar10(options.root) else "digits"
    return options


def load_graphs(options: argparse.Namespace) -> tuple[ImageGraphs, ImageGraphs, ImageGraphs]:
    """Return training, validation and test graphs; of CIFAR-10 the last two a fifth as many."""
    has_pixels = options.model == "pixelvig"
    patch = 1 if has_pixels else PATCH[options.dataset]
    most = options.images if options.dataset == "cifar10" else None
    limits = (most, most and most // 5, most and most // 5)
    train, val, test = (
        ImageGraphs((pixels[:limit], labels[:limit]), patch, has_edges=has_pixels)
        for (pixels, labels), limit in zip(
            load_images(options.dataset, options.root), limits, strict=True
        )
    )
    return train, val, test


def build_module(graphs: ImageGraphs, options: argparse.Namespace) -> GraphClassifier:
    L.seed_everything(options.seed, verbose=False)
    num_features, num_classes = graphs.patches.size(-1), 10
    if options.model == "pixelvig":
        pixelvig = PixelViG(num_features, num_classes, options.blocks, norm=options.norm)
        return GraphClassifier(pixelvig, num_classes, options.lr)
    vig = ViG(
        num_features,
        options.hidden,
        num_classes,
        options.blocks,
        grid=graphs.grid,
        conv=options.conv,
        norm=options.norm,
    )
    return GraphClassifier(vig, num_classes, options.lr, weight_decay=0.05, inputs=("x", "batch"))


if __name__ == "__main__":
    main()

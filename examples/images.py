"""The images of the examples, each as a graph of its patches: digits and CIFAR-10.

Digits come with scikit-learn. CIFAR-10 is read from ``root``, never downloaded: from
``cifar-10-batches-py``, the folder that its archive of Python files unpacks to, or from the arrays
``jpeg``, ``offsets`` and ``labels`` of ``extras/CIFAR10_jpeg/{train,test}.npz``.
"""

from __future__ import annotations

import io
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.utils import grid, remove_self_loops

CIFAR10_FOLDERS = ("cifar-10-batches-py", "extras/CIFAR10_jpeg")
NUM_VALIDATION_IMAGES = 5_000
"""Of CIFAR-10's 50,000 training images."""

Images = tuple[Tensor, Tensor]
"""``[num_images, rows, columns, colours]`` bytes, and labels ``[num_images]``."""


class ImageGraphs(Dataset[Data]):
    """Images as graphs: one node a patch, row by row, its pixels as features of mean about 0.

    Args:
        images: What is cut into patches.
        patch: Rows and columns of a patch; 1 makes each pixel a node.
        has_edges: Whether to join each node to the up to eight around it; without, a graph has no
            edges, and a network finds its own.
    """

    def __init__(self, images: Images, patch: int, has_edges: bool = False) -> None:
        pixels, self.labels = images
        num, rows, columns, colours = pixels.shape
        self.grid = (rows // patch, columns // patch)
        cut = pixels.view(num, self.grid[0], patch, self.grid[1], patch, colours)
        self.patches = cut.transpose(2, 3).reshape(num, self.grid[0] * self.grid[1], -1)
        self.edges: dict[str, Tensor] = {}
        if has_edges:
            self.edges["edge_index"] = remove_self_loops(grid(*self.grid)[0])[0]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Data:
        x = self.patches[index].float() / 63.75 - 2  # bytes to -2 .. 2
        return Data(x=x, y=self.labels[index], **self.edges)


def load_images(name: str, root: str | None) -> tuple[Images, Images, Images]:
    """Return the training, validation and test images of ``digits`` or ``cifar10``, shuffled."""
    if name == "digits":
        pixels, labels = load_digits_images()
        order = shuffled(len(labels))
        parts = np.split(order, [len(order) * 6 // 10, len(order) * 8 // 10])
        train, val, test = ((pixels[part], labels[part]) for part in parts)
        return train, val, test
    folder = find_cifar10(root)
    if folder is None:
        raise FileNotFoundError(
            f"Expected CIFAR-10 in one of {', '.join(CIFAR10_FOLDERS)} below {root!r} (not found). "
            "Name the folder that holds it with --root, or take --dataset digits."
        )
    read = read_batches if folder.name == "cifar-10-batches-py" else read_jpegs
    pixels, labels = read(folder, "train")
    order = shuffled(len(labels))
    parts = [order[NUM_VALIDATION_IMAGES:], order[:NUM_VALIDATION_IMAGES]]
    train, val = ((pixels[part], labels[part]) for part in parts)
    test_pixels, test_labels = read(folder, "test")
    order = shuffled(len(test_labels))
    return train, val, (test_pixels[order], test_labels[order])


def find_cifar10(root: str | None) -> Path | None:
    """Return the folder of CIFAR-10 below ``root``, if there is one."""
    folders = [] if root is None else [Path(root, name) for name in CIFAR10_FOLDERS]
    return next((folder for folder in folders if folder.is_dir()), None)


def load_digits_images() -> Images:
    """Return scikit-learn's 1,797 images of digits, 8 x 8 pixels of one colour."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)  # grey levels 0 .. 16
    levels = torch.from_numpy(pixels * 255 / 16).to(torch.uint8)
    return levels.view(-1, 8, 8, 1), torch.from_numpy(labels).long()


def read_batches(folder: Path, split: str) -> Images:
    """Read CIFAR-10's Python files: planes of red, green and blue."""
    names = [f"data_batch_{n}" for n in range(1, 6)] if split == "train" else ["test_batch"]
    batches: list[dict[bytes, Any]] = []
    for name in names:
        with (folder / name).open("rb") as file:
            batches.append(pickle.load(file, encoding="bytes"))
    planes = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batch[b"labels"] for batch in batches])
    return torch.from_numpy(planes.transpose(0, 2, 3, 1).copy()), torch.from_numpy(labels).long()


def read_jpegs(folder: Path, split: str) -> Images:
    """Read an array of compressed images that stand one after the other."""
    from PIL import Image

    arrays = np.load(folder / f"{split}.npz")
    data, offsets = arrays["jpeg"].tobytes(), arrays["offsets"]
    pixels = [np.asarray(Image.open(io.BytesIO(data[a:b]))) for a, b in pairwise(offsets)]
    return torch.from_numpy(np.stack(pixels)), torch.from_numpy(arrays["labels"]).long()


def shuffled(number: int) -> np.ndarray[Any, Any]:
    """Return an order, always the same: files may be sorted by label."""
    return np.random.default_rng(0).permutation(number)

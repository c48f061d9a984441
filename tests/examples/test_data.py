"""The examples' graphs, images and molecules: some without any file, others from a folder."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import cache_dir, link_raw_files, load_graph
from images import ImageGraphs, find_cifar10, load_images
from molecule_sets import load_molecules
from torch_geometric.utils import contains_self_loops, is_undirected


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_dir()


def test_digits_are_an_undirected_neighbour_graph():
    data = load_graph("digits")
    assert (data.num_nodes, data.num_features) == (1797, 64)
    assert is_undirected(data.edge_index) and not contains_self_loops(data.edge_index)
    degrees = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    assert degrees.min() >= 10
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert sorted(set(data.y.tolist())) == list(range(10))


def test_what_is_unknown_or_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"digits, Cora.*ogbn-\* \(got 'Corra'\)"):
        load_graph("Corra")
    with pytest.raises(FileNotFoundError, match=r"Expected the raw files of Minesweeper.*--root"):
        load_graph("minesweeper", str(tmp_path))
    with pytest.raises(ValueError, match=r"synthetic, ogbg-molhiv, MUTAG.*\(got 'water'\)"):
        load_molecules("water", None)
    assert find_cifar10(None) is None and find_cifar10(str(tmp_path)) is None
    with pytest.raises(FileNotFoundError, match=r"Expected CIFAR-10.*cifar-10-batches-py.*--root"):
        load_images("cifar10", str(tmp_path))


def test_raw_files_are_linked_not_copied_and_processed_ones_left_out(tmp_path, cache):
    """root/Family/some_set/{raw/a, raw/more/b, processed/c} -> cache/Family/some_set/raw/..."""
    source = tmp_path / "root" / "Family" / "some_set"
    for name in ("raw/a", "raw/more/b", "processed/c"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    for _call in range(2):  # the second one finds the links
        assert link_raw_files("Family", "Some-Set", str(tmp_path / "root")) == cache / "Family"
    linked = cache / "Family" / "some_set"
    assert (linked / "raw/a").is_symlink() and (linked / "raw/a").read_text() == "raw/a"
    assert (linked / "raw/more/b").read_text() == "raw/more/b"
    assert not (linked / "processed").exists()


def test_patches_are_the_blocks_of_an_image_row_by_row():
    """An image of 4 x 6 pixels of two colours in patches of 2 x 2."""
    pixels = torch.arange(48, dtype=torch.uint8).view(1, 4, 6, 2)
    graphs = ImageGraphs((pixels, torch.tensor([3])), patch=2)
    assert graphs.grid == (2, 3) and len(graphs) == 1
    graph = graphs[0]
    patch = (graph.x[4] + 2) * 63.75  # second row, second column
    assert patch.round().tolist() == pixels[0, 2:4, 2:4].flatten().tolist()
    assert graph.y == 3 and graph.edge_index is None


def test_cifar_is_read_from_its_python_files(tmp_path):
    """1,200 images a training file; red is the file's number, but for the first row's second."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate(["test_batch", *(f"data_batch_{n}" for n in range(1, 6))]):
        data = np.zeros((1200, 3072), np.uint8)
        data[:, :1024] = number
        data[:, 1] = 7
        (folder / name).write_bytes(pickle.dumps({b"data": data, b"labels": [number] * 1200}))
    train, val, test = load_images("cifar10", str(tmp_path))
    assert [len(labels) for _, labels in (train, val, test)] == [1000, 5000, 1200]
    for pixels, labels in (train, val, test):
        assert pixels.shape[1:] == (32, 32, 3)
        assert torch.equal(pixels[:, 5, 5, 0].long(), labels)
        assert (pixels[:, 0, 1, 0] == 7).all() and (pixels[..., 1:] == 0).all()
    assert sorted(set(train[1].tolist())) == [1, 2, 3, 4, 5]

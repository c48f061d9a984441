"""The examples' graphs, images and molecules: some without any file, others from a folder."""

from __future__ import annotations

import csv
import gzip
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import graphs
import numpy as np
import pytest
import torch
from graphs import cache_dir, link_raw_files, load_graph
from images import ImageGraphs, find_cifar10, load_digits_images, load_images
from molecule_sets import draw_molecule, load_molecules
from torch_geometric.data import Data
from torch_geometric.utils import contains_self_loops, is_undirected

from lightning_gnnpipe import FullGraphDataModule


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_dir()


def root_with(folder: str) -> str:
    """Return the folder of data sets, if it holds this one."""
    root = os.environ.get("GNNPIPE_DATA")
    if root is None or not Path(root, folder, "raw").is_dir():
        pytest.skip(f"GNNPIPE_DATA names no folder that holds {folder}/raw")
    return root


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


def test_only_one_at_a_time_writes_to_the_cache(monkeypatch):
    """Two that process a data set at once would read each other's unfinished files."""
    running = most = 0

    def build(root: str, name: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.1)
        running -= 1
        return name

    monkeypatch.setitem(graphs.FAMILIES, "Planetoid", (build, ("Cora",)))
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(load_graph, ["cora"] * 3)) == ["Cora"] * 3
    assert most == 1


def test_sets_are_read_from_the_data_folder():
    data = FullGraphDataModule(load_graph("cora", root_with("Planetoid/Cora"))).data
    assert (data.num_nodes, data.num_edges) == (2708, 10556)
    masks = data.train_mask, data.val_mask, data.test_mask
    assert [int(mask.sum()) for mask in masks] == [140, 500, 1000]
    molecules = load_molecules("mutag", root_with("TUDataset/MUTAG"))
    assert [len(part) for part in (molecules.train, molecules.val, molecules.test)] == [150, 19, 19]
    assert (molecules.atom_channels, molecules.bond_channels) == (7, 4)


def test_patches_are_the_blocks_of_an_image_row_by_row():
    """An image of 4 x 6 pixels of two colours in patches of 2 x 2."""
    pixels = torch.arange(48, dtype=torch.uint8).view(1, 4, 6, 2)
    graphs = ImageGraphs((pixels, torch.tensor([3])), patch=2)
    assert graphs.grid == (2, 3) and len(graphs) == 1
    graph = graphs[0]
    patch = (graph.x[4] + 2) * 63.75  # second row, second column
    assert patch.round().tolist() == pixels[0, 2:4, 2:4].flatten().tolist()
    assert graph.y == 3 and graph.edge_index is None


def test_pixels_are_joined_to_those_around_them():
    graphs = ImageGraphs((torch.zeros(1, 3, 3, 1, dtype=torch.uint8), torch.zeros(1)), 1, True)
    degrees = torch.bincount(graphs[0].edge_index[1])
    assert degrees.tolist() == [3, 5, 3, 5, 8, 5, 3, 5, 3]


def test_digits_are_split_in_disjoint_parts_of_all_classes():
    parts = load_images("digits", None)
    assert [len(labels) for _, labels in parts] == [1078, 359, 360]
    assert all(sorted(set(labels.tolist())) == list(range(10)) for _, labels in parts)
    everything = torch.cat([pixels for pixels, _ in parts]).flatten(1)
    together = load_digits_images()[0].flatten(1)
    assert torch.equal(everything.sum(0), together.sum(0))


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


def has_group(graph: Data) -> bool:
    ends = graph.x[:, 0][graph.edge_index]
    return any(
        {a, b} == {0, 1} and bond == 2
        for a, b, bond in zip(*ends.tolist(), graph.edge_attr[:, 0].tolist(), strict=True)
    )


def test_synthetic_molecules_hold_the_group_that_is_their_class():
    molecules = [draw_molecule(seed) for seed in range(40)]
    assert [has_group(one) for one in molecules] == [bool(one.y) for one in molecules]
    for one in molecules:
        assert one.num_edges == 2 * one.num_nodes and not one.has_isolated_nodes()
        assert one.is_undirected()
    again = draw_molecule(7)
    assert all(torch.equal(again[name], molecules[7][name]) for name in again.to_dict())


def test_ogb_node_data_set_is_read_and_read_again(tmp_path):
    """A folder in OGB's layout; the second reading unpickles what the first one wrote."""
    pytest.importorskip("ogb", reason="the extra 'examples' is not installed")
    nodes = torch.arange(10)
    graph = Data(torch.eye(10), torch.stack([nodes, nodes.roll(-1)]), y=nodes % 3)
    write_ogb_folder(tmp_path / "ogbn_products", graph)
    for _reading in range(2):
        data = FullGraphDataModule(graphs.load_ogb_graph("ogbn-products", tmp_path)).data
        assert data.num_nodes == 10 and data.y.tolist() == graph.y.tolist()
        masks = data.train_mask, data.val_mask, data.test_mask
        assert [mask.nonzero().item() for mask in masks] == [7, 8, 9]


def write_ogb_folder(folder: Path, graph: Data) -> None:
    """Write the raw files of ``graph``, the split (7, 8, 9) and OGB's sign that it is current."""
    raw, split = folder / "raw", folder / "split" / "sales_ranking"
    tables = {
        raw / "edge": graph.edge_index.t().tolist(),
        raw / "node-feat": graph.x.tolist(),
        raw / "node-label": graph.y[:, None].tolist(),
        raw / "num-node-list": [[graph.num_nodes]],
        raw / "num-edge-list": [[graph.num_edges]],
        split / "train": [[7]],
        split / "valid": [[8]],
        split / "test": [[9]],
    }
    for path, rows in tables.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(f"{path}.csv.gz", "wt") as file:
            csv.writer(file).writerows(rows)
    (folder / "RELEASE_v1.txt").touch()

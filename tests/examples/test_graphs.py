"""The examples' graphs: digits without any file, others from a folder that is only read."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import graphs
import pytest
import torch
from graphs import cache_dir, link_raw_files, load_graph
from torch_geometric.utils import contains_self_loops, is_undirected

from lightning_gnnpipe import FullGraphDataModule


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


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"digits, Cora.*ogbn-\* \(got 'Corra'\)"):
        load_graph("Corra")


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Expected the raw files of Minesweeper.*--root"):
        load_graph("minesweeper", str(tmp_path))


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


def test_cora_is_read_from_the_data_folder():
    root = os.environ.get("GNNPIPE_DATA")
    if root is None or not Path(root, "Planetoid", "Cora", "raw").is_dir():
        pytest.skip("GNNPIPE_DATA names no folder that holds Planetoid/Cora/raw")
    data = FullGraphDataModule(load_graph("cora", root)).data
    assert (data.num_nodes, data.num_edges) == (2708, 10556)
    assert [int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask)] == [
        140,
        500,
        1000,
    ]

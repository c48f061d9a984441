"""The examples with mini-batches of graphs: their data, and runs as a user makes them."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import cache_dir
from images import ImageGraphs, find_cifar10, load_digits_images, load_images
from molecule_sets import draw_molecule, load_molecules
from PIL import Image
from torch_geometric.data import Data

from tests.helpers.scripts import ROOT, start_script


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_dir()


def run(script: str, monkeypatch, capsys, *options: str) -> str:
    """Run an example in this process; return what it prints."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options])
    monkeypatch.setenv("COLUMNS", "120")
    threads = torch.get_num_threads()
    try:
        importlib.import_module(script).main()
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


def figure(output: str, label: str) -> str:
    [value] = re.findall(rf"^│ {re.escape(label)}[^│]*│ +(.*?) +│$", output, re.M)
    return value


# Images


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


def save_batches(folder: Path) -> None:
    """Write CIFAR-10 in its own format, 1,200 images a training file; red is the file's number."""
    folder.mkdir()
    for number, name in enumerate(["test_batch", *(f"data_batch_{n}" for n in range(1, 6))]):
        data = np.zeros((1200, 3072), np.uint8)
        data[:, :1024] = number
        data[:, 1] = 7  # red of the second pixel of the first row
        with (folder / name).open("wb") as file:
            pickle.dump({b"data": data, b"labels": [number] * 1200}, file)


def save_jpegs(folder: Path) -> None:
    folder.mkdir(parents=True)
    for split, number in (("train", 6000), ("test", 3)):
        files = []
        for level in range(number):
            buffer = io.BytesIO()
            colour = (level % 256, 0, 0)
            Image.new("RGB", (32, 32), colour).save(buffer, "JPEG", quality=95)
            files.append(buffer.getvalue())
        np.savez(
            folder / f"{split}.npz",
            jpeg=np.frombuffer(b"".join(files), np.uint8),
            offsets=np.cumsum([0, *map(len, files)]),
            labels=np.arange(number) % 10,
        )


def test_cifar_is_read_from_its_python_files(tmp_path):
    save_batches(tmp_path / "cifar-10-batches-py")
    train, val, test = load_images("cifar10", str(tmp_path))
    assert [len(labels) for _, labels in (train, val, test)] == [1000, 5000, 1200]
    for pixels, labels in (train, val, test):
        assert pixels.shape[1:] == (32, 32, 3)
        assert torch.equal(pixels[:, 5, 5, 0].long(), labels)
        assert (pixels[:, 0, 1, 0] == 7).all() and (pixels[..., 1:] == 0).all()
    assert sorted(set(train[1].tolist())) == [1, 2, 3, 4, 5]


def test_cifar_is_read_from_arrays_of_compressed_images(tmp_path):
    save_jpegs(tmp_path / "extras" / "CIFAR10_jpeg")
    train, val, test = load_images("cifar10", str(tmp_path))
    assert [len(labels) for _, labels in (train, val, test)] == [1000, 5000, 3]
    levels = test[0][:, 16, 16, 0].long()
    assert (levels - test[1]).abs().max() <= 3  # compressed with losses


def test_cifar_that_is_not_there_is_named(tmp_path):
    assert find_cifar10(None) is None and find_cifar10(str(tmp_path)) is None
    with pytest.raises(FileNotFoundError, match=r"Expected CIFAR-10.*cifar-10-batches-py.*--root"):
        load_images("cifar10", str(tmp_path))


# Molecules


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


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"synthetic, ogbg-molhiv, MUTAG.*\(got 'water'\)"):
        load_molecules("water", None)


def test_mutag_is_read_from_the_data_folder():
    root = os.environ.get("GNNPIPE_DATA")
    if root is None or not Path(root, "TUDataset", "MUTAG", "raw").is_dir():
        pytest.skip("GNNPIPE_DATA names no folder that holds TUDataset/MUTAG/raw")
    molecules = load_molecules("mutag", root)
    assert [len(part) for part in (molecules.train, molecules.val, molecules.test)] == [150, 19, 19]
    assert (molecules.atom_channels, molecules.bond_channels) == (7, 4)


# Runs


def test_vig_learns_digits_by_the_example(tmp_path, monkeypatch, capsys):
    options = "--dataset=digits", "--blocks=2", "--hidden=16", "--epochs=6", "--lr=0.005"
    output = run("vig_cifar", monkeypatch, capsys, *options, f"--output={tmp_path}")
    assert figure(output, "graphs to train on") == "1,078, 359, 360"
    assert float(figure(output, "test accuracy").rstrip("%")) > 40
    assert float(figure(output, "seconds a training step")) > 0


def test_pixelvig_runs_by_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GNNPIPE_DATA", str(tmp_path))
    options = "--model=pixelvig", "--blocks=1", "--epochs=1"
    output = run("vig_cifar", monkeypatch, capsys, *options, f"--output={tmp_path}")
    assert "pixelvig, 1 blocks, on digits" in output  # no CIFAR-10 below the root
    assert figure(output, "parameters") != "0"


def test_gin_learns_molecules_by_the_example(tmp_path, monkeypatch, capsys):
    options = "--layers=2", "--hidden=16", "--epochs=4", "--lr=0.01", "--virtual-node", "--jk=cat"
    output = run("molecules", monkeypatch, capsys, *options, f"--output={tmp_path}")
    assert float(figure(output, "test accuracy").rstrip("%")) > 90


def test_stages_and_micro_batches_train_as_one_process_does(tmp_path, monkeypatch, capsys):
    options = ["--layers=3", "--hidden=8", "--epochs=1", "--lr=0.01", "--dropout=0"]
    alone = run("molecules", monkeypatch, capsys, *options, f"--output={tmp_path / 'alone'}")

    options += ["--stages=2", "--micro-batches=3", f"--output={tmp_path / 'stages'}"]
    path = ROOT / "examples" / "molecules.py"
    done = start_script(path, *options, is_new=False, output=tmp_path / "output.txt")
    done.end(240)
    assert done.returncode == 0, done.text
    for label in ("parameters", "test accuracy"):
        assert figure(done.text, label) == figure(alone, label)

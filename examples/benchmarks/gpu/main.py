"""How fast and how large is training on one GPU, beside PyG's full batch?

python examples/benchmarks/gpu/main.py --device cuda --out results
python examples/benchmarks/gpu/main.py --device cpu --out results       tiny: shows that it runs
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

sys.path.append(str(Path(__file__).parents[1]))
import kernels
from common import print_table, train_once

from lightning_gnnpipe.codecs.codec import get_codec

CODEC = Path(__file__).parents[1] / "codec" / "main.py"
WHATS = ("times", "host", "kernels", "codecs", "largest")
NUM_CLASSES = 10
FULL = "out of memory"
LEAST_S = 10  # a run that could not even begin is left out
SMALL = {
    "nodes": 2_000,
    "edges": 12_000,
    "layers": [4],
    "chunks": [4],
    "hidden": 16,
    "precisions": ["32-true"],
}
LARGE = {
    "nodes": 1_000_000,
    "edges": 16_000_000,
    "layers": [16, 32],
    "chunks": [1, 8, 32],
    "hidden": 128,
    "precisions": ["32-true", "bf16-mixed"],
}
LEAN = {"recompute": True, "histories": "bfloat16"}
Rows = list[dict[str, Any]]


def main() -> None:
    options = parse()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    for what in options.what:
        if bench.left_s < LEAST_S:
            print(f"\n{what}: not run, the time was up")
            continue
        rows = getattr(bench, what)()
        save(folder, what, rows)
        print(f"\n{what}\n")
        print_table(*table_of(rows))
        draw(folder, what, rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda")
    add("--out", default="outputs", help="a folder for JSON, tables and pictures")
    add("--what", nargs="+", choices=WHATS, default=list(WHATS))
    add("--minutes", type=float, default=9.0, help="what has not begun by then is left out")
    for name in ("nodes", "edges", "hidden"):
        add(f"--{name}", type=int)
    for name in ("layers", "chunks"):
        add(f"--{name}", type=int, nargs="+")
    add("--precisions", nargs="+")
    add("--steps", type=int, default=5)
    options = parser.parse_args(arguments)
    for name, value in (SMALL if options.device == "cpu" else LARGE).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


class Bench:
    """Measures on one device, each run in a process of its own, until the time is up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.end = time.monotonic() + 60 * options.minutes
        self.shared = {
            "accelerator": "gpu" if options.device == "cuda" else "cpu",
            "partition": "contiguous",  # the graph's blocks are; METIS would take minutes
            "balance": "uniform",
            "hidden": options.hidden,
            "warm": 2,
            "steps": options.steps,
        }

    def times(self) -> Rows:
        """Step time and peak memory: PyG's full batch, and K chunks."""
        options = self.options
        settings: dict[str, dict[str, Any]] = {
            "PyG, edge_index": {"mode": "plain"},
            "PyG, CSR": {"mode": "csr"},
        }
        settings |= {f"K = {chunks}": {"chunks": chunks} for chunks in options.chunks}
        captured = {"cuda_graphs": True, "warm": 3}  # graphs are made in the third step
        settings |= {
            f"K = {chunks}, CUDA graphs": {"chunks": chunks, **captured}
            for chunks in options.chunks
            if chunks > 1
        }
        settings[f"K = {options.chunks[-1]}, lean"] = {"chunks": options.chunks[-1], **LEAN}
        rows: Rows = []
        with self.graph(options.nodes, options.edges) as graph:
            for precision in options.precisions:
                sizes = [{"precision": precision, "layers": layers} for layers in options.layers]
                runs = [(size, name) for size in sizes for name in settings]
                rows += self.train_each(
                    [{**size, "setting": name} for size, name in runs],
                    [{"graph": graph, **settings[name], **size} for size, name in runs],
                )
        return rows

    def host(self) -> Rows:
        """The same with rows on the host: every read and write crosses the bus."""
        options = self.options
        size = {"layers": options.layers[0], "chunks": options.chunks[-1]}
        places: Rows = [{}, {"history_device": "cpu:0"}]
        with self.graph(options.nodes, options.edges) as graph:
            return self.train_each(
                [{**size, "setting": name} for name in ("device", "host")],
                [{"graph": graph, **size, **place} for place in places],
            )

    def kernels(self) -> Rows:
        """Kernels of sparse products; see `kernels.py`."""
        options = self.options
        return kernels.measure(self.device, options.nodes, options.edges, options.hidden, 5)

    def codecs(self) -> Rows:
        """Encoding and decoding of rows, in GB/s of float32."""
        options, module = self.options, runpy.run_path(str(CODEC))
        shape = options.nodes // 10, options.hidden
        copy_ns, medians = module["measure"](shape, 5, self.device)
        rows = [{"setting": "copy", "encode_gb_per_s": 4 / copy_ns}]
        for name, (encode_ns, decode_ns) in medians.items():
            if get_codec(name).payload_bytes(shape, torch.float32) < 4 * shape[0] * shape[1]:
                row = {"encode_gb_per_s": 4 / encode_ns, "decode_gb_per_s": 4 / decode_ns}
                rows.append({"setting": name, **row})
        return rows

    def largest(self) -> Rows:
        """The largest graph before memory ends: nodes are doubled, with 16 edges each."""
        layers = self.options.layers[0]
        most = self.options.chunks[-1]
        settings: dict[str, dict[str, Any]] = {
            "PyG, edge_index": {"mode": "plain"},
            "PyG, CSR": {"mode": "csr"},
            f"K = {most}": {"chunks": most},
            f"K = {most}, lean": {"chunks": most, **LEAN},
        }
        best: dict[str, dict[str, Any]] = {name: {"nodes": 0} for name in settings}
        is_small = self.device.type == "cpu"
        num_nodes = self.options.nodes // (1 if is_small else 4)
        limit = self.options.nodes * (1 if is_small else 16)
        alive = dict(settings)
        while alive and num_nodes <= limit and self.left_s > LEAST_S:
            with self.graph(num_nodes, 16 * num_nodes) as graph:
                for name, setting in list(alive.items()):
                    found = self.train(graph=graph, layers=layers, **{**setting, "steps": 1})
                    if "error" in found:
                        best[name]["then"] = f"{num_nodes:,}: {found['error']}"
                        del alive[name]
                    else:
                        best[name] |= {"nodes": num_nodes, **found}
            num_nodes *= 2
        return [{"setting": name, "layers": layers, **row} for name, row in best.items()]

    def train_each(self, rows: Rows, settings: Rows) -> Rows:
        """Return the rows with what was measured, trained one after the other.

        On a GPU they are set up side by side, and the first begins when all are: that takes most
        of the time. What does not fit beside the others, which hold the graph, runs again alone.
        """
        if self.device.type == "cpu":
            return [row | self.train(**one) for row, one in zip(rows, settings, strict=True)]
        with ThreadPoolExecutor(len(rows)) as pool, tempfile.TemporaryDirectory() as folder:
            turns = [Path(folder) / str(number) for number in range(len(rows))]
            runs = [
                pool.submit(self.train, turn=turn, **one)
                for turn, one in zip(turns, settings, strict=True)
            ]
            while not all(t.exists() or r.done() for t, r in zip(turns, runs, strict=True)):
                time.sleep(0.01)
            found = []
            for turn, run in zip(turns, runs, strict=True):
                turn.unlink(missing_ok=True)
                found.append(run.result())
        for number, one in enumerate(settings):
            if found[number].get("error") == FULL:
                found[number] = self.train(**one)
        return [row | one for row, one in zip(rows, found, strict=True)]

    def train(self, **setting: Any) -> dict[str, Any]:
        """Return median step and peak memory of one run, or the reason why there are none."""
        if self.left_s < LEAST_S:
            return {"error": "not run: the time was up"}
        try:
            run = train_once(timeout_s=self.left_s, **{**self.shared, **setting})
        except subprocess.TimeoutExpired:
            return {"error": "not finished: the time was up"}
        except RuntimeError as error:
            text = str(error)
            is_full = "OutOfMemoryError" in text or "out of memory" in text
            return {"error": FULL if is_full else text.strip().splitlines()[-1][:200]}
        peak = run["peak_mib"] - run["base_mib"]
        return {"step_s": statistics.median(run["step_s"]), "peak_mib": peak}

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def graph(self, num_nodes: int, num_edges: int) -> GraphFile:
        return GraphFile(num_nodes, num_edges, self.options.hidden, self.device)


class GraphFile:
    """A file that holds a synthetic graph: power-law degrees, consecutive blocks of nodes."""

    def __init__(
        self, num_nodes: int, num_edges: int, num_features: int, device: torch.device
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        generator = torch.Generator(device).manual_seed(0)

        edges = kernels.draw_edges(num_nodes, num_edges, device, generator).cpu()
        is_train = torch.rand(num_nodes) < 0.5
        data = Data(
            x=torch.randn(num_nodes, num_features),
            edge_index=edges,
            y=torch.randint(NUM_CLASSES, (num_nodes,)),
            train_mask=is_train,
            val_mask=~is_train,
            test_mask=~is_train,
        )
        self.path = str(Path(self._folder.name) / "graph.pt")
        torch.save(data, self.path)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def save(folder: Path, what: str, rows: Rows) -> None:
    """Write the rows as JSON and as a table."""
    (folder / f"{what}.json").write_text(json.dumps(rows, indent=2) + "\n")
    header, cells = table_of(rows)
    lines = [header, ["---"] * len(header), *cells]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (folder / f"{what}.md").write_text(text + "\n")


def table_of(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Return a header, and the cells of each row as text."""
    header = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        return f"{value:,.3f}" if isinstance(value, float) else str(value)

    return header, [[cell(row.get(key, "")) for key in header] for row in rows]


def draw(folder: Path, what: str, rows: Rows) -> None:
    """Write bars of each measured column."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = [key for key in table_of(rows)[0] if any(type(row.get(key)) is float for row in rows)]
    for column in columns:
        shown = [row for row in rows if column in row]
        names = [", ".join(str(v) for v in row.values() if type(v) in (str, int)) for row in shown]
        figure, axes = plt.subplots(figsize=(8, 0.4 * len(shown) + 1), layout="constrained")
        axes.barh(names, [row[column] for row in shown])
        axes.invert_yaxis()
        axes.set_xlabel(column)
        figure.savefig(folder / f"{what}_{column}.png", dpi=100)
        plt.close(figure)


if __name__ == "__main__":
    main()

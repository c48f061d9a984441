"""What does a message cost to encode and decode, and what does it save on the wire?

OMP_NUM_THREADS=1 python examples/benchmarks/codec/main.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_gnnpipe.chunks import now
from lightning_gnnpipe.codecs import Codec
from lightning_gnnpipe.codecs.codec import get_codec

sys.path.append(str(Path(__file__).parents[1]))
from common import print_table

SHAPES = [(50_000, 128), (50_000, 256)]
NAMES = ["fp32", "bf16", "int8", "int1"]
CPU = torch.device("cpu")
HEADER = [
    "codec",
    "bits a value",
    "encode, ns",
    "GB/s",
    "decode, ns",
    "GB/s",
    "both, over a copy",
    "saved at 1 Gbit/s, ns",
    "saved at 100 Mbit/s, ns",
    "pays below, Gbit/s",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for shape in SHAPES:
        copy_ns, medians = measure(shape, rounds)
        print(
            f"\n`{list(shape)}`; a copy takes {copy_ns:.2f} ns a value ({gb_per_s(copy_ns)} GB/s)\n"
        )
        rows = [row_of(get_codec(name), shape, *medians[name], copy_ns) for name in NAMES]
        print_table(HEADER, rows)


def measure(
    shape: tuple[int, int], rounds: int, device: torch.device = CPU
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return medians, in ns a value: of a copy, and of encode and decode by codec."""
    x, out = torch.randn(shape, device=device), torch.empty(shape, device=device)
    works: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(x)}
    for name in NAMES:
        works |= works_of(get_codec(name), x, out)
    times: dict[str, list[float]] = {what: [] for what in works}
    for number in range(rounds + 1):
        for what, work in works.items():
            start = now()
            work()
            if number:  # the first round warms up
                times[what].append((now() - start) * 1e9 / x.numel())
    ns = {what: statistics.median(found) for what, found in times.items()}
    return ns["copy"], {name: (ns[f"{name} encode"], ns[f"{name} decode"]) for name in NAMES}


def works_of(codec: Codec, x: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], object]]:
    payload = codec.landing_for(out)  # in `out` itself, if there is nothing to decode
    payload.copy_(codec.encode(x, 0))
    return {
        f"{codec.name} encode": lambda: codec.encode(x, 1),
        f"{codec.name} decode": lambda: codec.decode(payload, out),
    }


def row_of(
    codec: Codec, shape: tuple[int, int], encode_ns: float, decode_ns: float, copy_ns: float
) -> list[str]:
    bits = 8 * codec.payload_bytes(shape, torch.float32) / (shape[0] * shape[1])
    both_ns = encode_ns + decode_ns
    return [
        codec.name,
        f"{bits:.2f}",
        f"{encode_ns:.2f}",
        gb_per_s(encode_ns),
        f"{decode_ns:.2f}",
        gb_per_s(decode_ns),
        f"{both_ns / copy_ns:.1f}",
        f"{32 - bits:.1f}",  # 1 Gbit/s is 1 bit a ns
        f"{10 * (32 - bits):.0f}",
        f"{(32 - bits) / both_ns:.0f}" if bits < 32 else "-",
    ]


def gb_per_s(ns: float) -> str:
    """Return float32 values a time, as GB/s; none for what does nothing."""
    return f"{4 / ns:.1f}" if ns > 0.05 else "-"


if __name__ == "__main__":
    main()

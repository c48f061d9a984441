"""How much of what shards send each other is error, by codec: of rows, and of their gradients?

    python examples/benchmarks/codec/errors.py --root DIR

Trains GCNII on Cora, exactly and in one process, and takes the rows that the halves of a METIS
split would send each other in some epochs, with their gradients. Of each layer's messages it prints
the squared error that a codec makes, over the squared length of what is sent: the median layer, and
the range. Above 1 there is more error than message; it is right on average all the same. The last
line is the share that the longest row has of the squared length of all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCN2Conv

from lightning_gnnpipe.codecs import Codec
from lightning_gnnpipe.codecs.codec import get_codec
from lightning_gnnpipe.graph import partition_nodes
from lightning_gnnpipe.models import GCNII
from lightning_gnnpipe.types import CodecName

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from common import print_table
from graphs import load_graph

NAMES: list[CodecName] = ["bf16", "int8", "int1"]
NUM_DRAWS = 5
WIDTH, DROPOUT, LR = 64, 0.6, 0.01
CONV_DECAY, LINEAR_DECAY = 0.01, 5e-4


class Halo:
    """What the layers of a network read of the other half, and its gradient, of the last pass."""

    def __init__(self, shards: Tensor, layers: list[GCN2Conv]) -> None:
        self._shards = shards
        self.read: list[Tensor] = []
        for layer in layers:
            layer.propagate = self._through(layer.propagate)
        self._sent: list[Tensor] = []  # nodes that each half sends

    def _through(self, propagate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(edge_index: Tensor, x: Tensor, edge_weight: Tensor) -> Tensor:
            ends = self._shards[edge_index]
            is_cross = ends[0] != ends[1]
            other = x.clone()
            if other.requires_grad:
                other.retain_grad()
                self.read.append(other)
            sent = [edge_index[0, is_cross & (ends[1] == half)] for half in (0, 1)]
            self._sent = [torch.unique(nodes) for nodes in sent]
            near = propagate(edge_index[:, ~is_cross], x=x, edge_weight=edge_weight[~is_cross])
            far = propagate(edge_index[:, is_cross], x=other, edge_weight=edge_weight[is_cross])
            return near + far

        return run

    def messages(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return the rows that each half sends, and the gradients that it gets, by layer."""
        rows = [[x.detach()[nodes] for nodes in self._sent] for x in self.read]
        grads = [[x.grad[nodes] for nodes in self._sent] for x in self.read if x.grad is not None]
        return rows, grads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--root", default=os.environ.get("GNNPIPE_DATA"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--epochs", type=int, nargs="+", default=[20, 60, 100])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = load_graph("Cora", options.root)[0]
    net = GCNII(data.num_features, WIDTH, int(data.y.max()) + 1, options.layers, DROPOUT)
    shards = partition_nodes(data.edge_index, data.num_nodes, num_chunks=2, method="metis")
    halo = Halo(shards, list(net.convs))
    found = train(net, data, halo, options.epochs)
    header = ["codec", "bits a value", *(f"{what}, epoch {e}" for e in found for what in KINDS)]
    print_table(header, [*(row_of(get_codec(name), found) for name in NAMES), longest(found)])


KINDS = ("rows", "gradients")


def train(net: GCNII, data: Data, halo: Halo, epochs: list[int]) -> dict[int, Any]:
    """Return what has been sent in each of `epochs`."""
    convs = {id(p) for p in net.convs.parameters()}
    groups = [
        {"params": [p for p in net.parameters() if (id(p) in convs) == is_conv], "weight_decay": d}
        for is_conv, d in ((True, CONV_DECAY), (False, LINEAR_DECAY))
    ]
    optimizer = torch.optim.Adam(groups, lr=LR)
    found = {}
    for epoch in range(1, max(epochs) + 1):
        halo.read.clear()
        out = net(data.x, data.edge_index)
        optimizer.zero_grad()
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()  # type: ignore[no-untyped-call]
        if epoch in epochs:
            found[epoch] = halo.messages()
        optimizer.step()
    return found


def row_of(codec: Codec, found: dict[int, Any]) -> list[str]:
    shape = next(iter(found.values()))[0][0][0].shape
    bits = 8 * codec.payload_bytes(shape, torch.float32) / shape.numel()
    return [codec.name, f"{bits:.2f}", *each(found, lambda messages: error_of(codec, messages))]


def longest(found: dict[int, Any]) -> list[str]:
    def share_of(messages: list[Tensor]) -> float:
        lengths = torch.cat(messages).square().sum(1)
        return (lengths.max() / lengths.sum()).item()

    return ["longest row", "", *each(found, share_of)]


def each(found: dict[int, Any], measure: Callable[[list[Tensor]], float]) -> list[str]:
    """Return median and range over layers, of rows and of gradients in each epoch."""
    cells = []
    for kinds in found.values():
        for layers in kinds:
            shares = [measure(messages) for messages in layers]
            median = statistics.median(shares)
            cells.append(f"{median:.2g} ({min(shares):.2g} - {max(shares):.2g})")
    return cells


def error_of(codec: Codec, messages: list[Tensor]) -> float:
    """Return the squared error over the squared length of all messages of a layer."""
    error = length = 0.0
    for seed in range(NUM_DRAWS):
        for i, sent in enumerate(messages):
            out = torch.empty_like(sent)
            payload = codec.landing_for(out).copy_(codec.encode(sent, (seed * 2 + i) << 8))
            codec.decode(payload, out)
            error += (out - sent).square().sum().item()
            length += sent.square().sum().item()
    return error / length


if __name__ == "__main__":
    main()

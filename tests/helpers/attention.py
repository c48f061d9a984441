"""Networks with linear attention over all nodes, and for the oracle, the attention by rows.

Each attention is written a second time, by what every row adds to the sums over all nodes. These
parts of a sum are then rows like any other, of which some are fresh and others stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as gnn

from tests.helpers.graphs import NUM_CLASSES, NUM_FEATURES

WIDTH = 6
Total = Callable[[str, Tensor], Tensor]
"""Returns the sum of the rows, ``[num_nodes, *]``, of a name."""


class Inline(nn.Module):
    """SGFormer's attention, as many write it, in forward itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = gnn.GCNConv(NUM_FEATURES, WIDTH), gnn.GCNConv(WIDTH, NUM_CLASSES)
        self.middle = gnn.GCNConv(WIDTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        n = x.size(0)
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k = q / q.norm(p=2), k / k.norm(p=2)
        kv = torch.einsum("nd,nf->df", k, v)
        num = q @ kv + n * v
        den = (q * k.sum(0)).sum(-1, keepdim=True) + n
        x = x + num / den
        x = self.middle(x, edge_index).tanh()
        return self.last(x, edge_index)


def _inline(net: Any, total: Total, x: Tensor, edge_index: Tensor) -> Tensor:
    x = net.first(x, edge_index).relu()
    q, k, v = net.q(x), net.k(x), net.v(x)
    q = q / total("q", q**2).sum() ** 0.5
    k = k / total("k", k**2).sum() ** 0.5
    kv = total("kv", k.unsqueeze(2) * v.unsqueeze(1))
    num = q @ kv + len(x) * v
    x = x + num / ((q @ total("sum", k)).unsqueeze(1) + len(x))
    return net.last(net.middle(x, edge_index).tanh(), edge_index)


class Heads(nn.Module):
    """Attention in a module of its own, with heads, a mean, a transposed product and `1 / n`."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        k = self.lin(x).sigmoid().view(n, 2, WIDTH // 2)
        v = x.view(n, 2, WIDTH // 2)
        h = torch.einsum("nhd,hdf->nhf", k, torch.einsum("nhd,nhf->hdf", k, v) * (1 / n))
        root = torch.linalg.norm(x, dim=0, keepdim=True) / n**0.5
        x = x @ (x.t() @ k.flatten(1) / n) + h.reshape(n, WIDTH) / (1 + root)
        return self.out(x).tanh() - x.mean(dim=0)


def _heads(module: Any, total: Total, x: Tensor) -> Tensor:
    n = len(x)
    flat = module.lin(x).sigmoid()
    k, v = flat.view(n, 2, -1), x.view(n, 2, -1)
    kv = total("kv", k.unsqueeze(3) * v.unsqueeze(2)) / n
    h = torch.stack([k[:, head] @ kv[head] for head in range(2)], 1).flatten(1)
    root = (total("square", x**2) / n) ** 0.5
    x = x @ (total("xk", x.unsqueeze(2) * flat.unsqueeze(1)) / n) + h / (1 + root)
    return module.out(x).tanh() - total("mean", x) / n


class Between(nn.Module):
    """Attention over all nodes, `[num_nodes, WIDTH]`, between layers."""

    def __init__(self, attention: nn.Module, is_dense: bool = False) -> None:
        super().__init__()
        self.first, self.last = gnn.SAGEConv(NUM_FEATURES, WIDTH), gnn.GCNConv(WIDTH, NUM_CLASSES)
        self.middle, self.attention = gnn.GCNConv(WIDTH, WIDTH), attention
        self.is_dense = is_dense

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).tanh()
        if self.is_dense:
            x = x + self.attention(x.unsqueeze(0)).squeeze(0)
        else:
            x = x + self.attention(x)
        return self.last(self.middle(x, edge_index).tanh(), edge_index)


class OneGraph(nn.Module):
    """SGFormer, which needs a batch vector; its BatchNorms use running statistics."""

    def __init__(self) -> None:
        super().__init__()
        options = {"trans_num_heads": 2, "trans_dropout": 0.0, "gnn_dropout": 0.0}
        self.net = gnn.SGFormer(NUM_FEATURES, WIDTH, NUM_CLASSES, **options)
        self.last = gnn.GCNConv(NUM_CLASSES, NUM_CLASSES)
        self.train()

    def train(self, mode: bool = True) -> OneGraph:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.training = False
        return self

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        batch = edge_index.new_zeros(x.size(0))
        return self.last(self.net(x, edge_index, batch), edge_index)


def _sgformer(module: Any, total: Total, x: Tensor, mask: Tensor | None = None) -> Tensor:
    n, heads = x.size(1), module.heads
    q, k, v = (lin(x[0]).view(n, heads, -1) for lin in (module.q, module.k, module.v))
    q, k = q / (q**2).sum(-1, keepdim=True) ** 0.5, k / (k**2).sum(-1, keepdim=True) ** 0.5
    kv, ones = total("kv", k.unsqueeze(3) * v.unsqueeze(2)), total("k", k)
    out = (q.unsqueeze(3) * kv).sum(2) + n * v
    return (out / ((q * ones).sum(-1, keepdim=True) + n)).mean(1).unsqueeze(0)


class GPS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(NUM_FEATURES, WIDTH)
        options: dict[str, Any] = {"heads": 2, "norm": None, "attn_type": "performer"}
        self.convs = nn.ModuleList(
            gnn.GPSConv(WIDTH, gnn.GCNConv(WIDTH, WIDTH), **options) for _ in range(3)
        )
        self.out = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return self.out(x)


def _performer(module: Any, total: Total, x: Tensor, mask: Tensor | None = None) -> Tensor:
    n, heads = x.size(1), module.heads
    q, k, v = (lin(x[0]).view(n, heads, -1) for lin in (module.q, module.k, module.v))
    mat = module.fast_attn.projection_matrix.t()
    q, k = (q @ mat).relu() + 0.001, (k @ mat).relu() + 0.001
    kv, ones = total("kv", k.unsqueeze(3) * v.unsqueeze(2)), total("k", k)
    out = (q.unsqueeze(3) * kv).sum(2) / (q * ones).sum(-1, keepdim=True)
    return module.attn_out(out.flatten(1)).unsqueeze(0)


def _polynormer(module: Any, total: Total, x: Tensor, mask: Tensor | None = None) -> Tensor:
    h, n = module.h_lins(x[0]), x.size(1)
    k = q = module.k(x[0]).sigmoid().view(n, -1, module.heads)
    v = module.v(x[0]).view(n, -1, module.heads)
    kv, ones = total("kv", k.unsqueeze(2) * v.unsqueeze(1)), total("k", k)
    out = (q.unsqueeze(2) * kv).sum(1) / ((q * ones).sum(1, keepdim=True) + 1e-6)
    out = module.lns(out.flatten(1)) * (h + module.beta)
    return module.lin_out(out).relu().unsqueeze(0)


BY_ROWS: dict[type, Callable[..., Tensor]] = {
    Inline: _inline,
    Heads: _heads,
    gnn.attention.SGFormerAttention: _sgformer,
    gnn.attention.PerformerAttention: _performer,
    gnn.attention.PolynormerAttention: _polynormer,
}

ATTENTION_NETS: dict[str, Callable[[float], nn.Module]] = {
    "inline": lambda dropout: Inline(),
    "heads": lambda dropout: Between(Heads()),
    "sgformer": lambda dropout: OneGraph(),
    "gps": lambda dropout: GPS(),
    "polynormer": lambda dropout: Between(
        gnn.attention.PolynormerAttention(WIDTH, heads=2, head_channels=WIDTH // 2), is_dense=True
    ),
}
"""With sums over all nodes."""

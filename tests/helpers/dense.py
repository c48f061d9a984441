"""A check of the oracle itself: chunked GCN in dense algebra, gradients by hand.

With ``A`` the (normalised) adjacency, ``A[i, j]`` the weight of the edge from ``j`` to ``i``, a
chunk order splits it in three by who reads whom::

    A = A_own + A_earlier + A_stale       same chunk / source's chunk came earlier / came later

    forward     P  = (A_own + A_earlier) Z + A_stale H          Z: a call's source rows, H: stale
    backward    dZ = A_own^T dP + scale * A_earlier^T dP

No PyG, no autograd, no loop over chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """An adjacency matrix cut in three, each ``[num_nodes, num_nodes]``."""

    own: Tensor
    earlier: Tensor
    stale: Tensor

    @classmethod
    def of(cls, adjacency: Tensor, partition: Tensor, order: Sequence[int]) -> Split:
        turn = torch.empty(len(order), dtype=torch.long)
        turn[list(order)] = torch.arange(len(order))
        reader, source = turn[partition].unsqueeze(1), turn[partition].unsqueeze(0)
        parts = (source == reader, source < reader, source > reader)
        return cls(*(adjacency * part for part in parts))

    def aggregate(self, rows: Tensor, history: Tensor | None) -> Tensor:
        fresh = (self.own + self.earlier) @ rows
        return fresh if history is None else fresh + self.stale @ history

    def send_back(self, grad: Tensor, cross_chunk_grad_scale: float) -> Tensor:
        return self.own.t() @ grad + cross_chunk_grad_scale * (self.earlier.t() @ grad)


def gcn_adjacency(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return D^-1/2 (A + I) D^-1/2, where nodes that have a loop already get no second one."""
    adjacency = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    for source, target in edge_index.t().tolist():
        adjacency[target, source] += 1
    adjacency += torch.diag((adjacency.diagonal() == 0).double())
    scale = adjacency.sum(dim=1).rsqrt()
    return scale.unsqueeze(1) * adjacency * scale.unsqueeze(0)


def cross_entropy(outputs: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the masked nodes and its gradient, ``[num_nodes, num_classes]``."""
    shares = outputs.exp() / outputs.exp().sum(dim=1, keepdim=True)
    hits = torch.zeros_like(shares)
    hits[torch.arange(len(labels)), labels] = 1
    loss = -(hits * shares.log()).sum(dim=1)[mask].mean()
    return loss, (shares - hits) * mask.unsqueeze(1) / mask.sum()


Params = dict[str, Tensor]
Rows = list[Tensor]


def gcn(
    params: Params, x: Tensor, split: Split, history: Rows | None, num_layers: int
) -> tuple[Tensor, Rows, Rows]:
    """Return outputs, the source rows Z = X W^T of each call, and the inputs X of each layer."""
    inputs, sources = [], []
    for layer in range(num_layers):
        inputs.append(x)
        sources.append(x @ params[f"convs.{layer}.lin.weight"].t())
        x = split.aggregate(sources[-1], None if history is None else history[layer])
        x = x + params[f"convs.{layer}.bias"]
        x = x.clamp(min=0) if layer < num_layers - 1 else x
    return x, sources, inputs


def gcn_grads(params: Params, inputs: Rows, split: Split, grad: Tensor, scale: float) -> Params:
    """Return the gradient of each parameter, given that of the outputs."""
    grads: Params = {}
    for layer in reversed(range(len(inputs))):
        grads[f"convs.{layer}.bias"] = grad.sum(dim=0)
        grad = split.send_back(grad, scale)
        grads[f"convs.{layer}.lin.weight"] = grad.t() @ inputs[layer]
        grad = grad @ params[f"convs.{layer}.lin.weight"] * (inputs[layer] > 0)
    return grads

"""Compares the module in chunks with the module on the whole graph, before training."""

from lightning_gnnpipe.selfcheck.check import check_graphs, check_layers, norms_without_batch

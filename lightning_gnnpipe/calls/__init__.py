"""Arguments of a forward call: which tensors hold rows of nodes, edges or graphs."""

from lightning_gnnpipe.calls.call import Call, ChangedGraph, DataView, flatten_call, is_of_pairs
from lightning_gnnpipe.calls.graph_batch import GraphBatch, GraphRows, Kind
from lightning_gnnpipe.calls.graphs import KnownKinds, classify, draw_graphs
from lightning_gnnpipe.calls.kinds import EdgeSets, Inputs, count_nodes, find_edge_sets

"""Aliases, and the letters used in formulas throughout the package.

    N  nodes of the graph          n  a node
    E  edges of the graph
    K  chunks                      c  a chunk
    S  stages                      s  a stage
    L  layers                      l  a layer
    D  channels
    G  graph shards                R  data replicas

A *position* is a node's place in the chunk-contiguous order of a plan: chunk ``c`` holds the
positions ``start .. end - 1``. A *node* is an index in the user's own numbering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

CHUNKS_PER_STAGE = 4  # unless costs choose; as in all experiments of GNNPipe (arXiv 2308.10087)

PartitionMethod = Literal["metis", "kaminpar", "random", "contiguous"]
Partition = PartitionMethod | Tensor
StartMethod = Literal["popen", "fork"]
Weights = Literal["whole", "staged"]
CodecName = Literal["fp32", "bf16", "int8", "int1"]
CodecOption = CodecName | tuple[CodecName, CodecName]  # of rows, and of their gradients
DtypeName = Literal["bfloat16", "float16", "float32", "float64"]
StalenessName = Literal["drift", "constant", "gnnpipe"]
RepeatOption = bool | Literal["auto"]
Balance = Literal["measured", "uniform"] | Sequence[int]  # or the layers of each stage
Phase = Literal["forward", "backward"]
TrafficKind = Literal[
    "forward",
    "backward",
    "halo",
    "halo_grad",
    "output",
    "input_grad",
    "weight_grad",
    "data_grad",
    "control",
]

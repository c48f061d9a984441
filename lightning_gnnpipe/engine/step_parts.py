"""What one pass over the batch is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gnnpipe.comm import Codecs, Transport
from lightning_gnnpipe.engine.chunk_run import SeedOf
from lightning_gnnpipe.engine.inputs import PassInputs
from lightning_gnnpipe.graph import BatchPlan, Chunk, ChunkPlan, MicroBatch
from lightning_gnnpipe.passing import MessageContext, NativeContext
from lightning_gnnpipe.stages import Stage, Value

Piece = Chunk | MicroBatch


@dataclass(frozen=True, slots=True)
class StepParts:
    """What one pass is made of.

    Attributes:
        stages: This rank's, by their numbers.
        num_stages: Stages of all ranks, S.
        outputs: What is known of the model's outputs, on every rank.
        plan: The chunks; the one-chunk plan in exact passes over one graph.
        inputs: The batch, loaded.
        context: Serves message passing.
        transport: The other ranks.
        seed_of: Seeds of the segments' random numbers; None leaves the stream alone.
        is_training: Whether a backward pass follows.
        recompute: Whether backward computes activations again instead of keeping them.
        codecs: Of what stages send each other.
    """

    stages: Mapping[int, Stage]
    num_stages: int
    outputs: tuple[Value, ...]
    plan: ChunkPlan | BatchPlan
    inputs: PassInputs
    context: MessageContext | NativeContext
    transport: Transport
    seed_of: SeedOf | None
    is_training: bool
    recompute: bool
    codecs: Codecs
